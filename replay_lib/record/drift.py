"""A result beside its baseline: is it the same up to noise, and if not, by how much and which way.

The bound is the noise band of the dtype and the device (:mod:`replay_lib.noise`, where each entry
has its reason), on a CPU twice that, or the spread of this session's baselines, whichever is
larger. How far the baseline is from the recorded norm is left out, unlike in a verdict's band: a
baseline that moved would widen the band that it is measured by.
"""

from __future__ import annotations

import math
from typing import Any

from replay_lib.engine.protocol import Retained
from replay_lib.noise import device_kind, noise_of
from replay_lib.record.baselines import Document, Figures
from replay_lib.record.environment import Environment
from replay_lib.record.result import BaselineCheck, Result

FIGURES = {
    "norm": "the norm",
    "carried": "the norm with carried old log-probabilities",
    "quiet": "the quiet control's norm",
    "quiet_carried": "the quiet control's norm with carried old log-probabilities",
    "kept_tokens": "the share of loss tokens kept",
    "kept_advantage": "the share of |advantage x policy weight| kept",
    "kept_dloss_dlogprob": "the share of |dLoss/dlogprob| kept",
    "denominator": "the denominator",
}


#: A GPU is named by its environment, a CPU is not: with torch's plainest kernels in place of its
#: vectorised ones figures of four embedded cases moved by up to 8.7e-6, too near the band of 1e-5.
UNNAMED_CPU = 2.0


def environment_of(result: Result) -> Environment:
    """Where ``result`` was got."""
    part = f"{','.join(map(str, result.dp_ranks))} of {result.dp_recorded}"
    reduced = result.fidelity == "reduced"
    return Environment.of(
        result.device, result.dtype, result.versions, dp_ranks=part if reduced else None
    )


def figures_of(result: Result) -> Figures:
    """What a baseline keeps of ``result``."""
    effect = result.side_effect
    return Figures(
        norm=result.grad_norm_preclip,
        carried=next((o.grad_norm_preclip for o in result.old if o.old == "carried"), None),
        quiet=effect.quiet_norm if effect else None,
        quiet_carried=effect.quiet_norm_carried if effect else None,
        **_shares(result.retained),
        denominator=result.denominator,
        ratio=result.ratio,
        verdict=result.verdict,
    )


def _shares(retained: Retained | None) -> dict[str, float]:
    """The shares that are defined: one of nothing is not."""
    shares = {f"kept_{k}": v for k, v in (retained.model_dump() if retained else {}).items()}
    return {name: share for name, share in shares.items() if math.isfinite(share)}


def signed_difference(now: float, before: float) -> float:
    """(now - before) / |before|; 0 for equal figures, NaN where nothing can be said.

    Two figures that are the same sort of non-finite are equal: both NaN, or the same infinity.
    """
    if now == before or (math.isnan(now) and math.isnan(before)):
        return 0.0
    if not (math.isfinite(now) and math.isfinite(before)) or before == 0:
        return math.nan
    return (now - before) / abs(before)


def allowed(result: Result) -> tuple[float, str]:
    """How far a figure of ``result`` may lie from its baseline, relative, and what says so."""
    kind = device_kind(result.device)
    noise = noise_of(result.dtype, result.device).relative * (UNNAMED_CPU if kind == "cpu" else 1.0)
    spread = 0.0 if result.repeat_spread is None else result.repeat_spread
    if spread > noise:
        return spread, "the spread of this session's baselines"
    return noise, f"the noise of {result.dtype} on {'CPUs' if kind == 'cpu' else kind}"


def drift_of(now: Figures, before: Figures, bound: float, why: str) -> tuple[str, ...]:
    """One line a figure of ``before`` that ``now`` has not within ``bound``, relative."""
    lines = []
    for field, name in FIGURES.items():
        new, old = getattr(now, field), getattr(before, field)
        if old is None:
            continue
        if new is None:
            lines.append(f"{name} is not measured, its baseline is {old:.7g}")
            continue
        off = signed_difference(new, old)
        if not abs(off) <= bound:
            told = f"{off:+.2g}, {bound:.2g} is {why}" if math.isfinite(off) else "not comparable"
            lines.append(f"{name} is {new:.7g}, its baseline {old:.7g} ({told})")
    return tuple(lines)


def compared(result: Result, document: Document | None, case_digest: str) -> Result:
    """``result`` with what its baseline says; ``case_digest`` is that of the replayed files.

    A reduced result is held to the verdict that came with its baseline, since what the case expects
    is of all ranks.
    """
    environment = environment_of(result).slug
    check = BaselineCheck(environment=environment, state="no document")
    if document is not None:
        check = _check(result, document, case_digest, environment)
    told: dict[str, Any] = {"case_digest": case_digest, "baseline": check}
    if result.fidelity == "reduced" and not result.is_baseline and check.verdict_before:
        told["expected"] = check.verdict_before
    return result.model_copy(update=told)


def _check(result: Result, document: Document, case_digest: str, environment: str) -> BaselineCheck:
    if document.case_digest != case_digest:
        return BaselineCheck(environment=environment, state="another case")
    entry = document.methods.get(result.experiment)
    if entry is None:
        return BaselineCheck(environment=environment, state="no entry")
    drift = drift_of(figures_of(result), entry, *allowed(result))
    if document.deterministic and not result.deterministic:
        drift += ("replays do not repeat bit for bit, those of its baseline did",)
    return BaselineCheck(
        environment=environment,
        state="drifted" if drift else "kept",
        drift=drift,
        verdict_before=entry.verdict,
    )
