"""Norms: of the run's steps, and of every attempt beside the thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_lib.record.result import Result
from replay_lib.report.figures.drawing import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    Plot,
    Size,
    axes_of,
    plot,
    shortened,
)
from replay_lib.report.history import Point
from replay_lib.rule import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Marker and colour of each verdict; what no row names is drawn as "other".
MARKS: dict[Verdict, tuple[str, str]] = {
    Verdict.REPRODUCED: ("D", INK),
    Verdict.PASS: ("o", GREEN),
    Verdict.PARTIAL: ("^", BLUE),
    Verdict.FAIL: ("X", RED),
    Verdict.INCONCLUSIVE: ("P", ORANGE),
    Verdict.DEGENERATE: ("v", PURPLE),
}
OTHER = ("|", MUTED)


def history_plot(points: Sequence[Point]) -> Plot:
    """Norms by step (logarithmic) with median, target and detector where they are known."""
    last = points[-1]
    judged = next((p for p in reversed(points) if p.target is not None), last)
    times = "" if judged.ratio is None else f", {judged.ratio:.3g} times the median before it"
    alt = f"{len(points)} known steps; step {judged.step} has the norm {judged.norm:.4g}{times}."

    def draw(figure: Figure, size: Size) -> None:
        axes = axes_of(figure)
        steps = [p.step for p in points]
        axes.plot(steps, [p.norm for p in points], color=BLUE, lw=1.2, alpha=0.6, zorder=2)
        spikes = [p for p in points if p.ratio and p.detector and p.ratio > p.detector]
        calm = [p for p in points if p not in spikes]
        axes.plot([p.step for p in calm], [p.norm for p in calm], "o", color=BLUE, ms=4)
        axes.plot([p.step for p in spikes], [p.norm for p in spikes], "D", color=RED, ms=7)
        for p in spikes:
            at = (p.step, p.norm)
            axes.annotate(
                f"step {p.step}: {p.norm:.4g}",
                at,
                (0, 9),
                "data",
                "offset points",
                ha="right" if p is last and len(points) > 1 else "center",
                color=RED,
            )
        _thresholds(axes, judged)
        _scale(axes, points, size)

    return plot("history", "Gradient norm by step", alt, draw=draw, height=250)


def _thresholds(axes: Axes, last: Point) -> None:
    """Horizontal lines at the median before one step, and at its target and detector."""
    if last.median is None:
        return
    lines = [(1.0, f"median of the steps before {last.step}", MUTED, "-")]
    if last.target is not None:
        lines.append((last.target, f"target: {last.target:g} x median", GREEN, "--"))
    if last.detector is not None:
        lines.append((last.detector, f"detector: {last.detector:g} x median", ORANGE, "-."))
    for factor, label, colour, style in lines:
        axes.axhline(factor * last.median, color=colour, ls=style, lw=1.3, label=label)
    axes.legend(loc="upper left", fontsize=8.5)


def _scale(axes: Axes, points: Sequence[Point], size: Size) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    values = [p.norm for p in points] + [p.median for p in points if p.median]
    axes.set_ylim(min(values) / 1.6, max(values) * 4.0)  # room for the legend above the spike
    axes.xaxis.set_major_locator(
        MaxNLocator(4 if size.narrow else 9, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
    if len(points) == 1:
        axes.set_xlim(points[0].step - 5, points[0].step + 5)
    axes.set_xlabel("step")
    axes.set_ylabel("norm before clipping")


def attempts_plot(results: Sequence[Result]) -> Plot:
    """Ratio of each result of one case, lowest first, with target and detector as lines."""
    shown = sorted((r for r in results if r.ratio), key=lambda r: (not r.is_baseline, r.ratio or 0))
    best = min((r for r in shown if not r.is_baseline), key=lambda r: r.ratio or 0, default=None)
    alt = f"{len(shown)} results."
    if best is not None:
        alt += f" The lowest ratio is {best.ratio:.3g} under {best.experiment}: {best.verdict}."

    def draw(figure: Figure, size: Size) -> None:
        axes = axes_of(figure)
        for row, r in enumerate(shown):
            mark, colour = MARKS.get(r.verdict, OTHER)
            assert r.ratio is not None
            axes.plot([r.ratio], [row], mark, color=colour, ms=6.5, mew=1.2, zorder=3)
            carried = next((o.ratio for o in r.old if o.old == "carried"), None)
            if carried is not None:
                axes.plot([r.ratio, carried], [row, row], color=colour, lw=1, zorder=2)
                axes.plot([carried], [row], mark, color=colour, ms=6.5, mfc="none", zorder=3)
        length = 21 if size.narrow else 52
        axes.set_yticks(range(len(shown)), [shortened(r.experiment, length) for r in shown])
        axes.set_ylim(len(shown) - 0.5, -0.8)
        _ratio_axis(axes, shown, size)
        _marks_legend(figure, shown, size)

    height = 70 + 15.0 * len(shown)
    return plot(
        "attempts",
        "Every attempt: norm over median",
        alt,
        draw=draw,
        height=height,
        narrow_height=height + 40,
    )


def _ratio_axis(axes: Axes, shown: Sequence[Result], size: Size) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    target = next((r.target_ratio for r in shown if r.target_ratio), None)
    detector = next((r.detector_ratio for r in shown if r.detector_ratio), None)
    if target is not None:
        axes.axvline(target, color=GREEN, ls="--", lw=1.3, label=f"target {target:g}")
    if detector is not None:
        axes.axvline(detector, color=ORANGE, ls="-.", lw=1.3, label=f"detector {detector:g}")
    axes.set_xscale("log")
    subs = (1.0, 3.0) if size.narrow else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", alpha=0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("norm over median")


def _marks_legend(figure: Figure, shown: Sequence[Result], size: Size) -> None:
    from matplotlib.lines import Line2D

    used = sorted({r.verdict for r in shown}, key=lambda v: v.rank)
    handles = []
    for verdict in used:
        mark, colour = MARKS.get(verdict, OTHER)
        label = str(verdict)
        handles.append(Line2D([], [], color=colour, marker=mark, ls="", label=label))
    if any(o.old == "carried" for r in shown for o in r.old):
        label = "with carried old log-probabilities"
        handles.append(Line2D([], [], color=INK, marker="o", mfc="none", ls="", label=label))
    lines = figure.axes[0].get_legend_handles_labels()[0]
    figure.legend(
        handles=[*handles, *lines],
        loc="outside upper left",
        ncols=2 if size.narrow else 5,
        fontsize=8.5,
        columnspacing=1.2,
        handletextpad=0.4,
    )
