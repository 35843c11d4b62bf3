"""The batch: how far probabilities are apart, and whose advantages weigh more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replay_lib.analysis.signals.figures import Ratio
from replay_lib.analysis.signals.summary import Advantages, Outlier, RankAdvantages
from replay_lib.report.figures.drawing import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    RED,
    Plot,
    Size,
    axes_of,
    plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 3  # outliers written beside their mark; a table holds all
MOST_RANKS = 16  # drawn; a table holds all


def name_of(outlier: Outlier) -> str:
    """Where it is, as people look it up."""
    return f"dp {outlier.dp_rank} row {outlier.row} token {outlier.position}"


def ratio_at(outlier: Outlier) -> float:
    """The ratio whose logarithm chose it; a logarithm that no float can undo is held at 700."""
    return math.exp(min(outlier.value, 700.0))


def ratio_plot(ratio: Ratio, outliers: Sequence[Outlier], number: int) -> Plot:
    """Histogram of one probability ratio over loss tokens, with its outliers marked.

    Of ``outliers``, the furthest tokens, those beyond 2 or under 1/2 are marked.
    """
    far = [o for o in outliers if abs(o.value) > math.log(2.0)]
    named = sorted(far, key=lambda o: -abs(o.value))
    low, high = ratio.ratio.minimum, ratio.ratio.maximum
    alt = f"{ratio.tokens} loss tokens"
    if low is not None and high is not None:
        alt += f" from {low:.4g} to {high:.4g}; {ratio.outside} beyond 2 or under 1/2"
    if named:
        alt += "; furthest: " + ", ".join(f"{name_of(o)} {ratio_at(o):.4g}" for o in named[:3])

    def draw(figure: Figure, size: Size) -> None:
        axes = axes_of(figure)
        edges, counts = ratio.histogram.edges, ratio.histogram.counts
        axes.stairs(counts, edges, fill=True, color=BLUE, alpha=0.75)
        if edges[0] > 0 and edges[-1] / edges[0] > 4:
            axes.set_xscale("log", base=2)
        axes.set_xlim(_shown(ratio))
        axes.set_yscale("symlog", linthresh=1)
        # room above the bars for the names
        axes.set_ylim(0, max([*counts, 1]) * 10 ** (0.4 + 0.5 * len(named[:NAMED])))
        axes.axvline(1.0, color=INK, lw=0.9)
        for bound in (0.5, 2.0):
            if edges[0] < bound < edges[-1]:
                axes.axvline(bound, color=ORANGE, ls="--", lw=1.1)
        _named(axes, named, size)
        _plain_numbers(axes)
        axes.set_xlabel(f"{ratio.numerator} over {ratio.denominator} probability")
        axes.set_ylabel("loss tokens")

    title = f"Ratio of probabilities: {ratio.name}"
    return plot(f"ratio{number}", title, alt, draw=draw, height=230)


def _shown(ratio: Ratio) -> tuple[float, float]:
    """From the least to the largest ratio that a bin holds, 1/4 to 4 at least."""
    edges, counts = ratio.histogram.edges, ratio.histogram.counts
    filled = [number for number, count in enumerate(counts) if count]
    low = edges[filled[0]] if filled and not ratio.histogram.below else edges[0]
    high = edges[filled[-1] + 1] if filled and not ratio.histogram.above else edges[-1]
    least, most = ratio.ratio.minimum, ratio.ratio.maximum
    low, high = min(low, least or low, 0.25), max(high, most or high, 4.0)
    return max(low, edges[0]) / 1.2, min(high, edges[-1]) * 1.2


def _named(axes: Axes, outliers: Sequence[Outlier], size: Size) -> None:
    """Marks at the axis for all, names for the first few; what is outside stands at the border."""
    low, high = axes.get_xlim()
    at = [min(max(ratio_at(o), low), high) for o in outliers]
    axes.plot(at, [0.0] * len(at), "|", color=RED, ms=14, mew=1.6, clip_on=False, zorder=4)
    top = axes.get_ylim()[1]
    for place, (x, outlier) in enumerate(zip(at[:NAMED], outliers[:NAMED], strict=True)):
        axes.annotate(
            f"{name_of(outlier)}: {ratio_at(outlier):.3g}",
            (x, 0.0),
            (x, top / 10 ** (0.5 * place + 0.3)),
            ha="right" if x > math.sqrt(low * high) else "left",
            color=RED,
            fontsize=8 if size.narrow else 8.5,
            arrowprops={"arrowstyle": "-", "color": RED, "lw": 0.7, "alpha": 0.6},
        )


def _plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _ratio_tick(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())


def _ratio_tick(value: float) -> str:
    """``1/32`` rather than 0.03125."""
    inverse = 1 / value if 0 < value < 1 else 0.0
    whole = inverse > 0 and abs(inverse - round(inverse)) < 1e-6
    return f"1/{round(inverse)}" if whole else f"{value:g}"


def balance_plot(advantages: Advantages) -> Plot:
    """Sums of positive and of negative advantages, in all and of each data-parallel rank."""
    total = advantages.total
    ranks = sorted(advantages.ranks, key=lambda r: -(r.positive + r.negative))[:MOST_RANKS]
    rows = [total, *sorted(ranks, key=lambda r: r.dp_rank or 0)] if len(ranks) > 1 else [total]
    alt = f"positive {total.positive:.4g}, negative {total.negative:.4g} in all"
    if advantages.balance is not None:
        alt += f"; {advantages.balance:.3g} times as much positive as negative"

    def draw(figure: Figure, _size: Size) -> None:
        axes = axes_of(figure)
        for row, one in enumerate(rows):
            axes.barh(row, -one.negative, color=RED, alpha=0.8, height=0.66)
            axes.barh(row, one.positive, color=GREEN, alpha=0.8, height=0.66)
        most = max(max(r.positive, r.negative) for r in rows) or 1.0
        axes.set_xlim(-1.35 * most, 1.35 * most)
        for row, one in enumerate(rows):
            style: dict[str, Any] = {"va": "center", "fontsize": 8.5}
            axes.text(-one.negative - 0.02 * most, row, f"-{one.negative:.4g}", ha="right", **style)
            axes.text(one.positive + 0.02 * most, row, f"+{one.positive:.4g}", ha="left", **style)
        axes.axvline(0, color=MUTED, lw=1)
        axes.set_yticks(range(len(rows)), [_rank(one) for one in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("sum of advantages over loss tokens: negative, positive")

    height = 60 + 26.0 * len(rows)
    return plot("balance", "Advantage balance", alt, draw=draw, height=height)


def _rank(one: RankAdvantages) -> str:
    return "all ranks" if one.dp_rank is None else f"dp {one.dp_rank}"
