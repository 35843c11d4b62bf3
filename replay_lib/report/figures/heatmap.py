"""Norms by layer: where they sit as recorded and as replayed, and what each method does to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replay_lib.record.layer_norms import by_layer
from replay_lib.record.result import Result
from replay_lib.report.figures.drawing import CARD, Plot, Size, axes_of, plot, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[tuple[str, Mapping[str, float]]]

#: Changes beyond a factor of this much look alike.
LARGEST_CHANGE = 8.0


def where_plot(rows: Rows) -> Plot:
    """Each row's share of its own norm, by layer: rows of one step as recorded and as replayed.

    A recorded row is post-clip and rank-local, so its size tells nothing; where it sits does.
    """
    columns = _columns(rows)
    values = [_shares(norms, columns) for _, norms in rows]
    alt = "; ".join(_told_largest(name, norms) for name, norms in rows)

    def draw(figure: Figure, size: Size) -> None:
        axes = axes_of(figure)
        image = axes.imshow(values, aspect="auto", interpolation="none", cmap="magma_r", vmin=0)
        _label(axes, [name for name, _ in rows], columns, size)
        bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, pad=0.03, aspect=40)
        bar.set_label("share of the row's norm")

    height = 105 + 17.0 * len(rows) + 55
    return plot(
        "where",
        "Where the norm sits: recorded and replayed",
        alt,
        draw=draw,
        height=height,
        narrow_height=height + 15,
    )


def change_plot(results: Sequence[Result], baseline: Result) -> Plot:
    """Norm of each layer under each method over the baseline's, on a scale of powers of two."""
    base = by_layer(baseline.layer_norms)
    columns = list(base)
    rows = [(r.experiment, by_layer(r.layer_norms)) for r in results]
    values = [[_log2(norms.get(c), base[c]) for c in columns] for _, norms in rows]
    calmest = min(results, key=lambda r: r.grad_norm_preclip)
    alt = f"{len(rows)} methods; the lowest norm, {calmest.grad_norm_preclip:.4g}, is that of "
    alt += calmest.experiment

    def draw(figure: Figure, size: Size) -> None:
        axes = axes_of(figure)
        most = math.log2(LARGEST_CHANGE)
        image = axes.imshow(
            values, aspect="auto", interpolation="none", cmap="RdBu_r", vmin=-most, vmax=most
        )
        _label(axes, [name for name, _ in rows], columns, size)
        bar = figure.colorbar(
            image, ax=axes, location="bottom", shrink=0.6, pad=0.03, aspect=40, extend="both"
        )
        ticks = {"1/8": 1 / LARGEST_CHANGE, "1/2": 0.5, "1": 1.0, "2": 2.0, "8": LARGEST_CHANGE}
        bar.set_ticks([math.log2(tick) for tick in ticks.values()], labels=list(ticks))
        bar.set_label("norm over the baseline's")

    height = 125 + 14.0 * len(rows)
    return plot(
        "change",
        "What each method does, layer by layer",
        alt,
        draw=draw,
        height=height,
        narrow_height=height + 15,
    )


def _columns(rows: Rows) -> list[str]:
    """Names of all rows' columns, those of the fullest row first."""
    fullest = max((norms for _, norms in rows), key=len)
    more = [name for _, norms in rows for name in norms if name not in fullest]
    return list(dict.fromkeys([*fullest, *more]))


def _shares(norms: Mapping[str, float], columns: Sequence[str]) -> list[float]:
    whole = math.hypot(*norms.values())
    return [norms[c] / whole if c in norms and whole > 0 else math.nan for c in columns]


def _log2(norm: float | None, base: float) -> float:
    if norm is None or not base > 0 or not math.isfinite(norm):
        return math.nan
    return math.log2(max(norm / base, 1e-9))


def _told_largest(name: str, norms: Mapping[str, float]) -> str:
    most = max(norms, key=lambda key: norms[key])
    return f"{name}: most in {most} ({norms[most]:.3g})"


def _label(axes: Axes, names: Sequence[str], columns: Sequence[str], size: Size) -> None:
    length = 21 if size.narrow else 52
    axes.set_yticks(range(len(names)), [shortened(n, length) for n in names])
    every = max(1, math.ceil(len(columns) / (12 if size.narrow else 40)))
    shown = [i for i in range(len(columns)) if i % every == 0 or not _is_layer(columns[i])]
    axes.set_xticks(
        shown,
        [columns[i] for i in shown],
        rotation=90 if size.narrow else 45,
        ha="center" if size.narrow else "left",
        rotation_mode="default" if size.narrow else "anchor",
    )
    axes.xaxis.tick_top()
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color=CARD, lw=1)
    for column in range(1, len(columns) if len(columns) < 40 else 0):
        axes.axvline(column - 0.5, color=CARD, lw=1)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _is_layer(column: str) -> bool:
    return column.startswith("layer ")
