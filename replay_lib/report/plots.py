"""The plots of a report, each with its table, or what would give them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from replay_lib.analysis.signals.figures import Ratio
from replay_lib.analysis.signals.summary import RankAdvantages, Signals
from replay_lib.record.layer_norms import by_layer
from replay_lib.record.result import Result
from replay_lib.report.facts import Facts
from replay_lib.report.figures.batch import balance_plot, name_of, ratio_at, ratio_plot
from replay_lib.report.figures.drawing import Plot
from replay_lib.report.figures.heatmap import change_plot, where_plot
from replay_lib.report.figures.norms import attempts_plot, history_plot
from replay_lib.report.history import history_of
from replay_lib.report.view import Table, changed, history_table, layer_rows, layer_table, number

#: Rows of a plot by layer, and of one by attempt: beyond these the best ones are drawn.
MOST_ROWS = 60


@dataclass(frozen=True)
class Shown:
    """One plot in its place: ``plot``, or why there is none (``why``, and a ``command``)."""

    name: str
    title: str
    plot: Plot | None = None
    tables: tuple[Table, ...] = ()
    remark: str = ""
    why: str = ""
    command: str = ""


def shown(facts: Facts) -> list[Shown]:
    """Every plot, in the order in which people look."""
    return [
        _history(facts),
        _attempts(facts),
        _where(facts),
        _change(facts),
        *_ratios(facts),
        _balance(facts),
    ]


def _history(facts: Facts) -> Shown:
    name, title = "history", "Gradient norm by step"
    points = history_of(facts)
    if not points:
        return Shown(
            name,
            title,
            why="No step's norm is known.",
            command=f"spike-replay find {shlex.quote(facts.job)}",
        )
    remark = (
        "Snapshots hold the median of the norms before them, not those norms: steps that left "
        "neither a snapshot nor a warning in a log are not here."
    )
    return Shown(name, title, history_plot(points), (history_table(points),), remark)


def _attempts(facts: Facts) -> Shown:
    name, title = "attempts", "Every attempt: norm over median"
    results = facts.last_results()
    drawn = _best([r for r in changed(results) if r.ratio])
    if not drawn:
        return Shown(name, title, why="Nothing was replayed.", command=command_on(facts, "sweep"))
    return Shown(name, title, attempts_plot(drawn), (), _left_out(results, drawn))


def _left_out(results: Sequence[Result], drawn: Sequence[Result]) -> str:
    """What of ``results`` is not among those drawn, and why."""
    idle = len(results) - len(changed(results))
    more = len(results) - idle - len(drawn)
    told = [f"{idle} that changed nothing of the gradient"] if idle else []
    told += [f"{more} with a norm of zero or beyond the {MOST_ROWS} lowest"] if more else []
    return f"Not drawn: {' and '.join(told)}; the table of attempts has them." if told else ""


def _where(facts: Facts) -> Shown:
    name, title = "where", "Where the norm sits: recorded and replayed"
    rows = layer_rows(facts)
    if not rows:
        why = "Neither recorded figures of parameters nor a baseline with norms by layer are known."
        return Shown(name, title, why=why, command=command_on(facts, "replay"))
    remark = "Each row is divided by its own norm; what is blank is not known."
    if facts.signals is None:
        remark += " Recorded rows are missing: " + _analyze(facts)
    elif facts.signals.grad_info is None:
        absent = facts.signals.absent.get("grad_info", "the trainer saved no figures of parameters")
        remark += f" Recorded rows are missing: {absent}."
    else:
        remark += f" Recorded figures are {facts.signals.grad_info.caution}."
    table = layer_table(rows, "L2 norms by layer; recorded ones are post-clip and rank-local")
    return Shown(name, title, where_plot(rows), (table,), remark)


def _change(facts: Facts) -> Shown:
    name, title = "change", "What each method does, layer by layer"
    results = [r for r in facts.last_results() if r.layer_norms]
    base = next((r for r in results if r.is_baseline), None)
    others = [r for r in results if not r.is_baseline]
    tried = _best(changed(others))
    if base is None or not tried:
        why = "No method was replayed beside a baseline with norms by layer."
        return Shown(name, title, why=why, command=command_on(facts, "sweep"))
    rows = [(r.experiment, by_layer(r.layer_norms)) for r in (base, *tried)]
    table = layer_table(rows, "L2 norms by layer before clipping")
    return Shown(name, title, change_plot(tried, base), (table,), _left_out(others, tried))


def _ratios(facts: Facts) -> list[Shown]:
    title = "Ratios of probabilities"
    if facts.signals is None:
        return [_no_signals(facts, "ratio", title)]
    ratios = [r for r in (*facts.signals.ratios, *_session_ratios(facts.signals)) if r.tokens]
    if not ratios:
        absent = facts.signals.absent.get("ratios", "the batch holds no two sets of probabilities")
        return [Shown("ratio", title, why=f"There are none: {absent}.")]
    return [_ratio(facts.signals, ratio, number) for number, ratio in enumerate(ratios)]


def _ratio(signals: Signals, ratio: Ratio, place: int) -> Shown:
    outliers = [o for o in signals.outliers if o.kind == ratio.name]
    heads = ["where", "ratio", "token", "text", "advantage", "trajectory"]
    rows = [
        [
            name_of(o),
            number(ratio_at(o), ".4g"),
            str(o.token_id),
            o.text or "-",
            number(o.advantage, ".3g"),
            str(o.trajectory_id) if o.trajectory_id is not None else "-",
        ]
        for o in outliers
    ]
    table = Table(f"Furthest tokens of {ratio.name}", heads, rows)
    figures = [
        ["tokens", str(ratio.tokens)],
        ["mean", number(ratio.ratio.mean)],
        ["beyond 2 or under 1/2", str(ratio.outside)],
        ["least", number(ratio.ratio.minimum)],
        ["median", number(ratio.ratio.quantile(0.5))],
        ["99.9th percentile", number(ratio.ratio.quantile(0.999))],
        ["largest", number(ratio.ratio.maximum)],
        [f"k3 estimate of {ratio.divergence}", number(ratio.k3, ".3g")],
    ]
    summary = Table(f"Figures of {ratio.name}", ["figure", "value"], figures)
    tables = (summary, table) if rows else (summary,)
    drawn = ratio_plot(ratio, outliers, place)
    return Shown(drawn.name, drawn.title, drawn, tables)


def _balance(facts: Facts) -> Shown:
    name, title = "balance", "Advantage balance"
    if facts.signals is None:
        return _no_signals(facts, name, title)
    advantages = facts.signals.advantages
    if not advantages.total.tokens:
        return Shown(name, title, why="The batch trains no token.")
    rows = [_rank_row(one) for one in (advantages.total, *advantages.ranks)]
    heads = ["rank", "tokens", "positive sum", "negative sum", "positive", "negative", "near zero"]
    table = Table("Advantages over loss tokens", heads, rows)
    return Shown(name, title, balance_plot(advantages), (table,))


def _rank_row(one: RankAdvantages) -> list[str]:
    counts = [one.positive_tokens, one.negative_tokens, one.near_zero]
    name = "all" if one.dp_rank is None else f"dp {one.dp_rank}"
    sums = [number(one.positive), number(-one.negative)]
    return [name, str(one.tokens), *sums, *map(str, counts)]


def _no_signals(facts: Facts, name: str, title: str) -> Shown:
    why = "The batch was not analyzed."
    if facts.signals_fault:
        why = f"What analyze wrote cannot be read by this version: {facts.signals_fault}."
    return Shown(name, title, why=why, command=_analyze(facts))


def _analyze(facts: Facts) -> str:
    return command_on(facts, "analyze")


def command_on(facts: Facts, command: str) -> str:
    """A command line on the selected snapshot that keeps what it finds in this ledger."""
    place = shlex.quote(facts.usable) if facts.usable else "SNAPSHOT"
    return f"spike-replay {command} {place} --task {shlex.quote(facts.job)}"


def _best(results: Sequence[Result]) -> list[Result]:
    """At most so many as can be drawn, the baseline and the lowest norms, in that order."""
    order = sorted(results, key=lambda r: (not r.is_baseline, r.grad_norm_preclip))
    return order[:MOST_ROWS]


def _session_ratios(signals: Signals) -> tuple[Ratio, ...]:
    return signals.session.ratios if signals.session else ()
