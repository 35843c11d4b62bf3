"""From facts to what page and text show: sentences, rows of tables, plots or what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from replay_lib.record.layer_norms import by_layer, group_of
from replay_lib.record.result import Result
from replay_lib.record.table import COLUMNS, NOT_FULL
from replay_lib.report.facts import Attempt, Facts, step_of, tally
from replay_lib.report.history import Point, history_of
from replay_lib.rule import Status, Verdict

Row = Sequence[str]

#: Of a verdict, beside its word and never instead of it: a sign, and a class of the style sheet.
SIGNS: Mapping[Verdict, tuple[str, str]] = {
    Verdict.REPRODUCED: ("◆", "good"),
    Verdict.PASS: ("●", "good"),
    Verdict.PARTIAL: ("▲", "part"),
    Verdict.INCONCLUSIVE: ("✚", "part"),
    Verdict.NOT_APPLICABLE: ("○", "none"),
    Verdict.NO_OP: ("○", "none"),
    Verdict.DEGENERATE: ("▼", "odd"),
}
_BAD = ("✕", "bad")


@dataclass(frozen=True)
class Table:
    """``heads`` over ``rows``; ``caption`` says what it is of."""

    caption: str
    heads: Row
    rows: Sequence[Row] = field(default_factory=tuple)


def sign_of(verdict: Verdict) -> tuple[str, str]:
    """Sign and class of ``verdict``."""
    return SIGNS.get(verdict, _BAD)


def when(at: datetime) -> str:
    """A time as it is shown, in UTC."""
    return at.strftime("%Y-%m-%d %H:%M UTC")


def number(value: float | None, spec: str = ".6g") -> str:
    """``-`` where nothing is known."""
    return "-" if value is None else format(value, spec)


def headline(facts: Facts) -> str:
    """The state of the task in one or two sentences."""
    results = facts.last_results()
    baseline = next((r for r in results if r.is_baseline), None)
    if baseline is None:
        return "Nothing was replayed yet."
    told = [_reproduction(baseline)]
    tried = [r for r in results if not r.is_baseline]
    if tried:
        told.append(_best(tried))
    return " ".join(told)


def _reproduction(baseline: Result) -> str:
    if baseline.verdict is Verdict.REPRODUCED:
        ratio = f", {baseline.ratio:.3g} times the median" if baseline.ratio else ""
        return f"The recorded spike came out again{ratio}."
    return f"The baseline is {baseline.verdict}: {baseline.reason}."


def _best(tried: Sequence[Result]) -> str:
    """The best attempt; what only tells of causes comes last.

    Of those that are proven the smallest intervention: the fewest methods at once, then the most
    signal kept, since a norm far under the target is no aim. Of partial ones the lowest norm.
    """
    count = f"{len(tried)} attempt" + "s" * (len(tried) != 1)
    helped = [r for r in tried if r.status in (Status.PROVEN, Status.PARTIAL)]
    if helped:
        best = min(helped, key=_intervention)
        kept = f", {best.retained.smallest:.0%} of the signal kept" if best.retained else ""
        unseen = "" if best.side_effect else "; its side effects are not measured"
        ratio = number(best.ratio, ".3g")
        return f"Best of {count}: {best.experiment}, {best.status}, ratio {ratio}{kept}{unseen}."
    if all(r.evidence == "mechanism" for r in tried):
        return f"{count}, on a median that was not measured: none says what a method is worth."
    lower = [r for r in tried if r.verdict in (Verdict.PASS, Verdict.PARTIAL)]
    if lower:
        best = min(lower, key=lambda r: r.grad_norm_preclip)
        return f"Of {count} none is proven; {best.experiment} is {best.status}: {best.verdict}."
    return f"None of {count} helped."


def _intervention(result: Result) -> tuple[bool, int, float, float]:
    if result.status is Status.PARTIAL:
        return True, 0, 0.0, result.grad_norm_preclip
    known = result.retained is not None and math.isfinite(result.retained.smallest)
    kept = result.retained.smallest if result.retained and known else 0.0
    return False, len(result.mitigations), -kept, result.grad_norm_preclip


def key_figures(facts: Facts) -> list[tuple[str, str, str]]:
    """Label, figure and remark of what is looked at first."""
    results = facts.last_results()
    baseline = next((r for r in results if r.is_baseline), None)
    if baseline is None:
        return []
    band = number(baseline.noise_band, ".2g")
    figures = [
        ("recorded norm", number(baseline.recorded_norm), "before clipping"),
        (
            "replayed norm",
            number(baseline.grad_norm_preclip),
            f"{baseline.dtype}, {baseline.device}",
        ),
        ("relative difference", number(baseline.relative_difference, ".2g"), f"noise band {band}"),
        ("ratio", number(baseline.ratio, ".4g"), f"median {number(baseline.median_norm)}"),
        ("fidelity", baseline.fidelity, _SHORT.get(baseline.fidelity, NOT_FULL)),
    ]
    counts = tally(results)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts)
    return [*figures, ("attempts", str(sum(n for _, n in counts)), told or "none yet")]


_SHORT = {"full": "as recorded", "folded": "every rank's batch, in turn"}


def fidelity(result: Result) -> str:
    """What a replay's fidelity means, in words."""
    ranks = f"{len(result.dp_ranks) or result.dp_recorded} of {result.dp_recorded}"
    if result.fidelity == "reduced":
        return f"{NOT_FULL}: {ranks} data-parallel ranks were replayed, nothing is proven by it"
    if result.fidelity == "folded":
        return (
            f"every rank's batch ({ranks}), summed in turn: the same gradient up to the order of "
            "summation"
        )
    return f"every rank's batch ({ranks}) on the recorded layout"


def places(facts: Facts) -> Table:
    """Where everything lies."""
    rows = [["output directory", path] for path in facts.outputs] or [["output directory", MISSING]]
    rows += [["selected snapshot", facts.snapshot or MISSING]]
    sources = set(facts.sources)
    rows += [
        ["copied from" if path in sources else "other snapshot", path]
        for path in facts.snapshots[:-1]
    ]
    gone = set(facts.released)
    rows += [
        ["released copy" if path in gone else "preserved copy", path] for path in facts.preserved
    ]
    rows += [["ledger", str(facts.ledger)]]
    return Table("Where it lies", ["what", "path"], rows)


MISSING = "not known: nothing in the ledger says it"


def baselines(facts: Facts) -> Table:
    """Every baseline: recorded against replayed."""
    heads = ["case", "recorded norm", "replayed norm", "relative difference", "allowed for noise"]
    rows = [
        [
            r.case,
            number(r.recorded_norm, ".10g"),
            number(r.grad_norm_preclip, ".10g"),
            number(r.relative_difference, ".2e"),
            number(r.noise_band, ".2g"),
            str(r.verdict),
            r.fidelity,
            f"{r.dtype} on {r.device}",
        ]
        for r in facts.baselines
    ]
    return Table("Baselines", [*heads, "verdict", "fidelity", "replayed as"], rows)


def attempts(facts: Facts) -> Table:
    """Every attempt in the order in which it was made, repeated ones too."""
    cells = {t: cell for t, cell in COLUMNS if t not in ("experiment", "case", "expected")}
    titles = ["verdict", *(title for title in cells if title != "verdict")]
    rows = [
        [a.name, *(cells[t](a.result) for t in titles), a.result.case, str(a.result.status or "-")]
        for a in facts.attempts
    ]
    rows = [[*row, when(a.at)] for row, a in zip(rows, facts.attempts, strict=True)]
    heads = ["experiment", *titles, "case", "status", "when"]
    return Table("Attempts, the first one first", heads, rows)


def reasons(facts: Facts) -> Iterator[tuple[Attempt, str]]:
    """Why each of the last results is what it is, failures of the quiet control and notes too."""
    last = {id(r) for r in facts.results}
    for attempt in facts.attempts:
        if id(attempt.result) in last:
            one = attempt.result
            yield attempt, "; ".join([one.reason, *one.drift, *one.notes])


def failures(facts: Facts) -> Table:
    """What gave no result."""
    rows = [[when(f.at), f.what, f.code, f.message, f.command, f.host] for f in facts.failures]
    return Table("Failures", ["when", "what", "code", "what happened", "command", "host"], rows)


def methods(facts: Facts) -> Table:
    """Methods that were recorded, the last word of each."""
    last = {m.method: m for m in facts.methods}.values()
    rows = [[m.method, m.status, m.card, when(m.at)] for m in last]
    return Table("Methods added", ["method", "status", "card", "when"], rows)


def matrix(facts: Facts) -> tuple[list[str], list[tuple[str, list[Verdict | None]]]]:
    """Cases, and each experiment's verdicts on them; those that did best come first."""
    results = facts.results
    cases = list(dict.fromkeys(r.case for r in results))
    found: dict[str, dict[str, Verdict]] = {}
    for r in results:
        found.setdefault(r.experiment, {})[r.case] = r.verdict
    rows = [(name, [own.get(case) for case in cases]) for name, own in found.items()]
    worst = len(Verdict)
    rows.sort(
        key=lambda row: (row[0] != "baseline", sum(v.rank if v else worst for v in row[1]), row[0])
    )
    return cases, rows


def changed(results: Sequence[Result]) -> list[Result]:
    """Without those that changed nothing of the gradient."""
    return [r for r in results if r.verdict not in (Verdict.NO_OP, Verdict.NOT_APPLICABLE)]


def layer_rows(facts: Facts) -> list[tuple[str, dict[str, float]]]:
    """Norms by layer: recorded (a row a rank), then the baseline's."""
    rows = []
    info = facts.signals.grad_info if facts.signals else None
    if info is not None:
        shown = info.ranks[:8] if len(info.ranks) <= 8 else ()
        rows = [(f"recorded, rank {r.rank}", _named(r.layers)) for r in shown]
        if not rows:
            rows = [("recorded, largest among ranks", _named(info.layers))]
    base = next((r for r in facts.last_results() if r.is_baseline and r.layer_norms), None)
    if base is not None:
        rows.append(("replayed baseline", by_layer(base.layer_norms)))
    return [(name, norms) for name, norms in rows if norms]


def _named(layers: Mapping[str, float]) -> dict[str, float]:
    """Layers under the names that replayed ones have, in their order."""
    return by_layer({_group(name): norm for name, norm in layers.items()})


def _group(name: str) -> str:
    last = name.removeprefix("layer ")
    return f"layers.{int(last)}.all" if last.isdigit() else group_of(name)


def layer_table(rows: Sequence[tuple[str, Mapping[str, float]]], caption: str) -> Table:
    """The figures behind a plot by layer: layers down, rows across."""
    columns = list(dict.fromkeys(c for _, norms in rows for c in norms))
    cells = [[c, *(number(norms.get(c), ".4g") for _, norms in rows)] for c in columns]
    return Table(caption, ["", *(name for name, _ in rows)], cells)


def history_table(points: Sequence[Point]) -> Table:
    """Known steps."""
    rows = [[str(p.step), number(p.norm), number(p.median), number(p.ratio, ".4g")] for p in points]
    return Table("Known steps", ["step", "norm", "median before", "ratio"], rows)


def environment(facts: Facts) -> Table:
    """On what it was replayed, each combination once."""
    rows: dict[tuple[str, ...], None] = {}
    for a in facts.attempts:
        r = a.result
        versions = ", ".join(f"{name} {version}" for name, version in sorted(r.versions.items()))
        layout = ", ".join(f"{axis}={n}" for axis, n in r.layout.items()) or "-"
        same = "bit-equal" if r.deterministic else "not bit-equal"
        row = (a.host, r.device, r.dtype, layout, r.backend, r.trainer, same, versions)
        rows[row] = None
    heads = ["host", "device", "dtype", "ranks", "backend", "loss", "replays", "versions"]
    return Table("Environment", heads, list(rows))


def history(facts: Facts) -> list[Point]:
    """Known steps, see :func:`history_of`."""
    return history_of(facts)


def selected_step(facts: Facts) -> str:
    """``step N``, or nothing."""
    step = step_of(facts.snapshot)
    return "" if step is None else f"step {step}"
