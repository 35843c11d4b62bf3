"""Which result of a task a card is written from, and what keeps one from being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replay_lib.engine.protocol import Experiment
from replay_lib.errors import UsageError, did_you_mean
from replay_lib.record.result import Result
from replay_lib.report.facts import Attempt, Facts
from replay_lib.rule import Flag, Status, Verdict

#: Verdicts worth a card; anything else fails, touches nothing, or cannot be told.
WORTH = (Verdict.PASS, Verdict.PARTIAL)
#: What a verdict may not hide and a card may not either.
BARRED = (Flag.INCONCLUSIVE, Flag.DEGENERATE, Flag.OLD_SENSITIVE, Flag.BEYOND_BUDGET)


@dataclass(frozen=True)
class Candidate:
    """The attempt that a card is written from, and the last one on each case beside it.

    ``attempt`` is the best of ``attempts`` by its status, then by its norm.
    """

    attempt: Attempt
    attempts: tuple[Attempt, ...]

    @property
    def result(self) -> Result:
        """That of the attempt."""
        return self.attempt.result

    @property
    def experiment(self) -> Experiment:
        """The method as it was replayed, compared with the baseline."""
        return Experiment(mitigations=self.result.mitigations)

    @property
    def status(self) -> Status:
        """By the rule; asked only of what is not refused."""
        status = self.result.status
        assert status is not None, "what has no status is refused"
        return status


def choose(facts: Facts, method: str, experiment: str | None) -> Candidate:
    """The candidate for ``method``, alone, under the parameters of ``experiment``.

    UsageError where the ledger has no such result, or several sets of parameters and none is named.
    """
    tried = [a for a in facts.attempts if not a.under]  # else another trainer's, or revision's
    own = [a for a in tried if [c.slug for c in a.result.mitigations] == [method]]
    names = list(dict.fromkeys(a.result.experiment for a in own))
    if experiment is None and len(names) > 1:
        raise UsageError(
            f"{method}: found {len(names)} experiments in {facts.ledger}: {'; '.join(names)}; "
            "expected one. Name it with --experiment"
        )
    wanted = names[0] if experiment is None and names else experiment
    chosen = [a for a in own if a.result.experiment == wanted]
    if not chosen:
        raise UsageError(_nothing(facts, method, experiment, names))
    last = {_place(a.result): a for a in chosen}
    attempts = tuple(last.values())
    return Candidate(min(attempts, key=_order), attempts)


def _place(result: Result) -> tuple[str, ...]:
    return result.case, result.against, result.device, result.dtype


def _order(attempt: Attempt) -> tuple[int, int, float]:
    """What may be recorded first, then what is worth most, then the lowest norm."""
    result = attempt.result
    status = result.status
    rank = len(Status) if status is None else list(Status).index(status)
    return len(refusals(result)), rank, result.grad_norm_preclip


def _nothing(facts: Facts, method: str, experiment: str | None, names: Sequence[str]) -> str:
    told = f"{method}: found no result of {experiment or 'it'} in {facts.ledger}"
    if names:
        return f"{told}; results of it there: {'; '.join(names)}"
    if "+" in method:
        return (
            f"{told}: a card is of one method. Write the combination as a method of its own, which "
            "returns the patches of both, and replay that"
        )
    single = {
        a.result.mitigations[0].slug for a in facts.attempts if len(a.result.mitigations) == 1
    }
    near = did_you_mean(method, single)
    then = near or f"Replay it first: spike-replay replay SNAPSHOT -m {method} --task {facts.job}"
    return f"{told}, alone and not in a combination. {then}"


def refusals(result: Result) -> list[str]:
    """Why ``result`` is nothing to record, one line a reason; empty: it may be."""
    why = []
    if result.verdict not in WORTH:
        why.append(f"its verdict is {result.verdict}: {result.reason}")
    barred = [
        str(flag) for flag in BARRED if flag in result.flags and str(flag) != str(result.verdict)
    ]
    if barred:
        why.append(f"it is {', '.join(barred)}: {result.reason}")
    if result.fidelity == "reduced":
        ranks = f"{len(result.dp_ranks)} of {result.dp_recorded} data-parallel ranks"
        why.append(f"it was replayed on {ranks}: not full-fidelity, so nothing is proven by it")
    if result.quiet_fault:
        why.append(result.quiet_fault)
    if result.against != "baseline":
        why.append(f"it was compared with {result.against} and not with the baseline")
    if result.evidence == "mechanism":
        why.append(
            "the median of its case was not measured: its verdicts tell nothing of a method's worth"
        )
    if result.backend != "native":
        why.append(f"it was replayed by {result.backend}, which does not measure what is kept")
    if not why and result.status in (None, Status.NEGATIVE):
        why.append(f"its reduction is too small to be worth recording: {result.reason}")
    return why
