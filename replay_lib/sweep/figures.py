"""What a search asks of a result: three figures, and why it may not take part."""

from __future__ import annotations

import math

from replay_lib.record.result import Result
from replay_lib.rule import Flag, Verdict


def reduction_of(result: Result) -> float | None:
    """That of the treatment of old log-probabilities which counted."""
    return result.old[0].reduction if result.old else result.reduction


def retained_of(result: Result) -> float | None:
    """The smallest share of the signal kept under any treatment; None: nobody measured it."""
    kept = [one for one in (result.retained, *(o.retained for o in result.old)) if one is not None]
    shares = [one.smallest for one in kept]
    return math.nan if any(map(math.isnan, shares)) else min(shares, default=None)


def quiet_change_of(result: Result) -> float | None:
    """|change| of the quiet control's norm, the larger one of both treatments."""
    change = result.side_effect.largest_change if result.side_effect else None
    return None if change is None else abs(change)


def why_not(result: Result) -> str | None:
    """Why ``result`` says nothing that could be weighed or built on; None if it does.

    What a gate ended (not finite, not reproduced, no change), an answer after the norm, what
    deletes the signal, and what does not reduce the norm by more than noise.
    """
    if result.rule is None:
        return str(result.verdict)
    if Flag.DEGENERATE in result.flags or result.verdict is Verdict.DEGENERATE:
        return str(Verdict.DEGENERATE)
    if result.quiet_fault is not None:
        return "quiet control at fault"
    if result.verdict in (Verdict.PASS, Verdict.PARTIAL):
        return None
    reduction, band = reduction_of(result), result.noise_band
    if reduction is None or band is None or not reduction > band:
        return "no reduction beyond noise"
    return None
