"""What a card says: the block of one task, and a whole card for a method that has none."""

from __future__ import annotations

import inspect
from pathlib import Path

from tabulate import tabulate

from replay_lib import layout
from replay_lib.method_cards.beside import Beside
from replay_lib.method_cards.candidate import Candidate
from replay_lib.patch import Mitigation
from replay_lib.record.cards import BLOCK_END, BLOCK_START, SECTIONS, Declared, patch_block
from replay_lib.record.markdown import plain as escaped
from replay_lib.record.result import Result
from replay_lib.record.table import COLUMNS
from replay_lib.report.facts import Facts, step_of
from replay_lib.rule import Status

NEAREST = 3  # recorded methods named on a card, those with the most similar gradients
ELSEWHERE = "Results are those of the tasks below."


def render_entry(facts: Facts, candidate: Candidate, beside: Beside, rationale: str) -> str:
    """One task's block: where from, what was measured, what is left of the spike, and why."""
    result, snapshot = candidate.result, candidate.attempt.snapshot
    step = step_of(snapshot)
    title = f"{facts.job}{'' if step is None else f', step {step}'}"
    rows = [
        ("job", facts.job),
        ("role", _role(snapshot)),
        ("snapshot", snapshot),
        ("experiment", result.experiment),
        ("fidelity", f"{result.fidelity}, {result.dtype} on {result.device}"),
        ("recorded norm", f"{_figure(result.recorded_norm)}, median {_figure(result.median_norm)}"),
        ("baseline", _baseline(facts, result)),
        ("replayed norm", _replayed(result)),
        ("signal kept", _kept(result)),
        ("ordinary step", _quiet(result)),
        ("beside recorded methods", _beside(beside)),
    ]
    table = tabulate(
        [[name, escaped(text)] for name, text in rows],
        headers=["what", "figure"],
        tablefmt="github",
        disable_numparse=True,
    )
    parts = [
        f"### {escaped(title)}",
        f"Status: {candidate.status} ({result.verdict} of {escaped(result.case)}).",
        table,
        _signals(facts, snapshot),
        f"Residual spike: {residual(result)}",
        f"Rationale: {escaped(rationale)}",
        _results(candidate),
    ]
    return "\n\n".join(parts)


def residual(result: Result) -> str:
    """What is left of the spike under the method."""
    counted = result.old[0].ratio if result.old else result.ratio
    target = result.target_ratio
    told = f"ratio {_figure(counted, '.4g')}"
    if target is not None and counted is not None:
        place = "at or under" if counted <= target else "above"
        told += f", {place} the target {target:g}"
    silent = {True: "would stay silent", False: "would still call it a spike", None: "is not known"}
    return f"{told}; the run's own detector {silent[result.below_detector]}."


def render_card(
    slug: str, method: Mitigation, declared: Declared, code: str, status: Status
) -> str:
    """A card for a method that has none, without its task's block."""
    about = (inspect.getdoc(method.build) or "").strip()
    summary = method.summary.strip()
    rest = about.removeprefix(summary).strip()
    words = {
        Status.PROVEN: "Proven by a replay; see the task below.",
        Status.PARTIAL: "It takes off at least 15% of the norm and does not cure the spike.",
        Status.DIAGNOSTIC: "It changes what the training means: it tells of causes and cures none.",
    }
    title = slug.replace("-", " ")
    bodies = {
        "Description": "\n\n".join(filter(None, [summary, rest])),
        "Status": words.get(status, ""),
        "Published evidence": _evidence(method),
        "Patch": patch_block(code),
        "Our results": f"{BLOCK_START}\n{ELSEWHERE}\n{BLOCK_END}",
    }
    parts = [f"# {title[0].upper()}{title[1:]}", declared.line()]
    parts += [f"## {section}\n\n{bodies[section]}" for section in SECTIONS]
    return "\n\n".join(parts) + "\n"


def _evidence(method: Mitigation) -> str:
    source = "" if method.family == "user" else escaped(method.source.strip())  # else its file
    recorded = "it was recorded from a task of this repository."
    return f"Its source, as declared: {source}; {recorded}" if source else f"None: {recorded}"


def _role(snapshot: str) -> str:
    above = layout.output_directory(Path(snapshot))
    named = layout.job_and_role(above.name) if above else None
    return named[1] if named else "not known: no output directory names it"


def _figure(value: float | None, spec: str = ".7g") -> str:
    return "not known" if value is None else format(value, spec)


def _baseline(facts: Facts, result: Result) -> str:
    base = next(
        (
            one
            for one in facts.baselines
            if (one.case, one.device, one.dtype) == (result.case, result.device, result.dtype)
        ),
        None,
    )
    norm = result.compared_norm if base is None else base.grad_norm_preclip
    off = _figure(result.relative_difference, ".2g")
    return f"{_figure(norm)}, {off} relative from the recorded norm"


def _replayed(result: Result) -> str:
    told = []
    for one in result.old:
        cut = _figure(one.reduction, ".1%")
        told.append(
            f"{one.grad_norm_preclip:.7g} with {one.old} old log-probabilities: ratio "
            f"{one.ratio:.4g}, {cut} under the baseline"
        )
    return "; ".join(told) or f"{result.grad_norm_preclip:.7g}"


def _kept(result: Result) -> str:
    kept = result.retained
    if kept is None:
        return "not known"
    cosine = f"; cosine to the unpatched gradient {_figure(result.cosine, '.3f')}"
    return ", ".join(f"{name} {share:.0%}" for name, share in kept) + cosine


def _quiet(result: Result) -> str:
    return "not measured" if result.side_effect is None else result.side_effect.explain()


def _beside(beside: Beside) -> str:
    """The nearest ones, and how many there were."""
    known = {slug: cosine for slug, cosine in beside.cosines.items() if cosine is not None}
    nearest = sorted(known, key=lambda slug: -known[slug])[:NEAREST]
    told = ", ".join(f"{slug} (cosine {known[slug]:.3f})" for slug in nearest)
    untold = f"; {len(beside.untold)} could not be compared" if beside.untold else ""
    if not beside.cosines:
        return f"none was replayed that acts at the same seams{untold}"
    at = "recorded method acts" if len(beside.cosines) == 1 else "recorded methods act"
    return f"{len(beside.cosines)} {at} at the same seams, nearest {told or 'none'}{untold}"


def _signals(facts: Facts, snapshot: str) -> str:
    """Signs of trouble that are there, or how to look for them."""
    signals = facts.signals_of(snapshot)
    if signals is None:
        return f"Key signals: not looked for (spike-replay analyze {escaped(snapshot)})."
    present = [s for s in signals.signs if s.present]
    if not present:
        return "Key signals: none of the known signs of trouble is present."
    lines = [f"- {escaped(s.name)}: {escaped(s.found)}" for s in present]
    return "\n".join(["Key signals:", "", *lines])


def _results(candidate: Candidate) -> str:
    shown = [a.result for a in candidate.attempts]
    rows = [[escaped(cell(r)) for _, cell in COLUMNS] + [r.timestamp[:10]] for r in shown]
    heads = [*(title for title, _ in COLUMNS), "date"]
    return tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)
