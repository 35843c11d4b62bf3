"""The words of a verdict, their one order, and the rule: pure functions of a few numbers."""

from __future__ import annotations

import enum
import math

TARGET_RATIO = 1.5  # "normal * 1.5" of the published method documents
RECORDING_REDUCTION = 0.15  # a smaller reduction is not worth recording, same source


class Verdict(enum.StrEnum):
    """All verdicts, from best to worst: the one order behind "better" and "worse"."""

    REPRODUCED = "reproduced"  # the baseline alone: the recorded spike came out again
    PASS = "pass"
    PARTIAL = "partial"
    NOT_APPLICABLE = "not_applicable"  # the answer acts after the norm
    INCONCLUSIVE = "inconclusive"
    FAIL = "fail"
    DEGENERATE = "degenerate"
    NO_OP = "no_op"
    NOT_A_SPIKE = "not_a_spike"
    NOT_REPRODUCED = "not_reproduced"
    NON_FINITE = "non_finite"
    RATIO_UNDEFINED = "ratio_undefined"
    REFERENCE_MISSING = "reference_missing"

    @property
    def rank(self) -> int:
        """0 for the best."""
        return list(Verdict).index(self)


class Flag(enum.StrEnum):
    """What a verdict may not hide; shown beside it, and no flagged pass is ever proven."""

    INCONCLUSIVE = "inconclusive"
    DEGENERATE = "degenerate"
    OLD_SENSITIVE = "old_sensitive"
    UNIT_UNCHECKED = "unit_unchecked"  # the loss changed its unit and no quiet control tells by how
    BEYOND_BUDGET = "beyond_budget"  # it moves ordinary steps further than the case allows


class Status(enum.StrEnum):
    """What a method is worth, from best to worst."""

    PROVEN = "proven"
    PARTIAL = "partial"
    DIAGNOSTIC = "diagnostic"
    NEGATIVE = "negative"


def ratio_of(norm: float, median: float | None) -> float | None:
    """Norm over median norm; None where the median is missing, zero or not finite."""
    if median is None or not math.isfinite(median) or not median > 0:
        return None
    return norm / median


def reduction_of(norm: float, compared: float | None) -> float | None:
    """1 - norm / compared norm; None where the compared norm is missing, zero or not finite."""
    ratio = ratio_of(norm, compared)
    return None if ratio is None else 1.0 - ratio


def rule(
    norm: float,
    median: float,
    compared: float | None,
    *,
    target_ratio: float = TARGET_RATIO,
    recording_reduction: float = RECORDING_REDUCTION,
) -> Verdict:
    """``pass``: norm / median <= target; ``partial``: reduced enough; ``fail``: neither."""
    ratio = ratio_of(norm, median)
    reduction = reduction_of(norm, compared)
    if ratio is not None and ratio <= target_ratio:
        return Verdict.PASS
    if reduction is not None and reduction >= recording_reduction:
        return Verdict.PARTIAL
    return Verdict.FAIL


def relative_difference(value: float, reference: float | None) -> float | None:
    """|value - reference| / |reference|; None without a reference that can be divided by."""
    if reference is None or not math.isfinite(reference) or reference == 0:
        return None
    return abs(value - reference) / abs(reference)


def compare(verdict: Verdict, *expected: Verdict) -> str:
    """``better``, ``as expected`` or ``worse``, by the order of :class:`Verdict`.

    Of several expected verdicts each is as expected. One that lies between them without being one
    of them is worse: it is not what arithmetic decides between, and below the best.
    """
    if verdict in expected:
        return "as expected"
    return "better" if verdict.rank < min(one.rank for one in expected) else "worse"


def status_of(
    verdict: Verdict,
    *,
    flags: tuple[Flag, ...] = (),
    reduction: float | None = None,
    fidelity: str,
    diagnostic: bool = False,
    quiet_fault: bool = False,
) -> Status:
    """What one result makes of its method.

    ``diagnostic`` (it changes the training's meaning) stays that. ``proven``: a pass on all ranks
    without a flag, whose quiet control is not at fault; without a quiet control nothing is known
    of side effects, and a pass still proves. ``partial``: any other pass, partial or inconclusive
    result that is reduced enough. All else is ``negative``: a degenerate result too, however far
    it brings the norm down, since it deletes the signal.
    ``reduction`` is that of the treatment of old log-probabilities which counted.
    """
    if diagnostic:
        return Status.DIAGNOSTIC
    sound = not flags and not quiet_fault
    if verdict is Verdict.PASS and sound and fidelity != "reduced":
        return Status.PROVEN
    judged = verdict in (Verdict.PASS, Verdict.PARTIAL, Verdict.INCONCLUSIVE)
    if judged and reduction is not None and reduction >= RECORDING_REDUCTION:
        return Status.PARTIAL
    return Status.NEGATIVE
