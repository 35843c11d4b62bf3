"""From norms to one verdict: gates first, then the rule, then what no verdict may hide.

Nothing here knows a file, a device or a model; every function is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from replay_lib.detect import is_spike
from replay_lib.engine.protocol import Retained
from replay_lib.noise import Noise
from replay_lib.rule import (
    RECORDING_REDUCTION,
    TARGET_RATIO,
    Flag,
    Verdict,
    ratio_of,
    reduction_of,
    relative_difference,
    rule,
)

SMALLEST_SHARE = 0.5  # a method that drops half of the signal has not cured it


@dataclass(frozen=True)
class Bound:
    """A tolerance or threshold with the reason for its size."""

    value: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One experiment under one treatment of old log-probabilities; norms before clipping.

    ``quiet_scale`` is norm(method) / norm(baseline) on the quiet control; None: not measured.
    """

    norm: float
    compared_norm: float
    retained: Retained | None = None
    quiet_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything a verdict depends on. Norms are L2 before clipping, the rest as named.

    ``same_digest_as`` names the experiment whose gradient came out bit-equal, if any;
    ``beyond_budget`` are figures of the quiet control outside the case's budgets, told.
    """

    recorded_norm: float | None
    median_norm: float | None
    spike_ratio: float | None
    baseline_norm: float
    repeat_spread: float
    tolerance: Bound
    noise: Noise
    stored: Variant
    carried: Variant | None = None
    is_baseline: bool = False
    nonfinite: tuple[str, ...] = ()
    touched: int = 0
    same_digest_as: str | None = None
    changes_unit: bool = False
    after_norm: bool = False
    beyond_budget: tuple[str, ...] = ()
    target_ratio: float = TARGET_RATIO
    recording_reduction: float = RECORDING_REDUCTION


@dataclass(frozen=True, kw_only=True)
class OldFinding:
    """The verdict under one treatment (``stored`` or ``carried``) of old log-probabilities."""

    old: str
    norm: float
    ratio: float
    reduction: float | None
    retained: Retained | None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict, its reason in one sentence, and the numbers behind it.

    Behind a gate ``rule`` is None and ``old`` empty. Otherwise ``old`` has a finding for each
    treatment of old log-probabilities, the one that counted first, and ``rule`` is what the bare
    rule says to that one.
    """

    verdict: Verdict
    reason: str
    noise_band: float | None
    rule: Verdict | None = None
    flags: tuple[Flag, ...] = ()
    below_detector: bool | None = None
    ratio_scaled: float | None = None
    old: tuple[OldFinding, ...] = ()


def noise_band(measured: Measured) -> float | None:
    """max(repeat spread, |baseline - recorded| / recorded, the table's entry).

    None without a recorded norm; infinite where one of the baselines was not finite.
    """
    off = relative_difference(measured.baseline_norm, measured.recorded_norm)
    if off is None:
        return None
    parts = (measured.repeat_spread, off, measured.noise.relative)
    return max(parts) if all(map(math.isfinite, parts)) else math.inf


# Gates: each gives the reason why nothing further can be said, or None. The order is the contract.


def _reference_missing(m: Measured) -> str | None:
    if m.recorded_norm is not None and math.isfinite(m.recorded_norm) and m.recorded_norm > 0:
        return None
    found = "no norm" if m.recorded_norm is None else f"the norm {m.recorded_norm!r}"
    return f"the snapshot records {found}, so a replay has nothing to reproduce"


def _ratio_undefined(m: Measured) -> str | None:
    if ratio_of(1.0, m.median_norm) is not None:
        return None
    found = "missing" if m.median_norm is None else repr(m.median_norm)
    return f"the median norm is {found}, so no ratio exists"


def _non_finite(m: Measured) -> str | None:
    named = ", ".join(m.nonfinite)
    if named:
        return f"not finite: {named}"
    norms = {"baseline": m.baseline_norm, "norm": m.stored.norm}
    norms["compared norm"] = m.stored.compared_norm
    if m.carried is not None:
        norms["norm with carried old log-probabilities"] = m.carried.norm
        norms["compared norm with carried old log-probabilities"] = m.carried.compared_norm
    bad = [f"{name} {value}" for name, value in norms.items() if not math.isfinite(value)]
    return f"not finite: {', '.join(bad)}" if bad else None


def _not_reproduced(m: Measured) -> str | None:
    off = relative_difference(m.baseline_norm, m.recorded_norm)
    if off is not None and off <= m.tolerance.value:
        return None
    return (
        f"the baseline's norm {m.baseline_norm:.7g} is {off:.3g} relative away from the recorded "
        f"{m.recorded_norm:.7g}, {m.tolerance.value:g} is allowed ({m.tolerance.reason})"
    )


def _not_a_spike(m: Measured) -> str | None:
    ratio = ratio_of(m.baseline_norm, m.median_norm)
    if ratio is None or not ratio <= m.target_ratio:
        return None
    return (
        f"the baseline is {ratio:.3f} x the median already, at or under the target "
        f"{m.target_ratio:g}: there is nothing to mitigate"
    )


def _no_op(m: Measured) -> str | None:
    if m.is_baseline or m.after_norm:
        return None
    if m.touched == 0:
        return "the patch touched nothing"
    if m.same_digest_as is not None:
        return (
            f"the patch touched {m.touched} values, but the gradient is bit-equal to that of "
            f"{m.same_digest_as}"
        )
    return None


GATES: tuple[tuple[Verdict, Callable[[Measured], str | None]], ...] = (
    (Verdict.REFERENCE_MISSING, _reference_missing),
    (Verdict.RATIO_UNDEFINED, _ratio_undefined),
    (Verdict.NON_FINITE, _non_finite),
    (Verdict.NOT_REPRODUCED, _not_reproduced),
    (Verdict.NOT_A_SPIKE, _not_a_spike),
    (Verdict.NO_OP, _no_op),
)


def judge(measured: Measured) -> Judgement:
    """The verdict on one experiment."""
    band = noise_band(measured)
    for verdict, gate in GATES:
        reason = gate(measured)
        if reason is not None:
            return Judgement(verdict=verdict, reason=reason, noise_band=band)
    assert measured.median_norm is not None and band is not None  # the gates above saw to it
    if measured.is_baseline:
        return _reproduced(measured, band)
    if measured.after_norm:
        reason = "it acts after the norm: the gradient before clipping is the baseline's"
        return Judgement(
            verdict=Verdict.NOT_APPLICABLE,
            reason=reason,
            noise_band=band,
            below_detector=_below_detector(measured, measured.stored.norm),
        )
    return _rule_and_flags(measured, band)


def _reproduced(m: Measured, band: float) -> Judgement:
    off = relative_difference(m.baseline_norm, m.recorded_norm)
    ratio = ratio_of(m.baseline_norm, m.median_norm)
    return Judgement(
        verdict=Verdict.REPRODUCED,
        reason=f"the recorded norm came out within {off:.2g} relative "
        f"({m.tolerance.value:g} is allowed), {ratio:.3f} x the median",
        noise_band=band,
        below_detector=_below_detector(m, m.baseline_norm),
    )


@dataclass(frozen=True)
class _Finding:
    """What one norm gave; ``variant`` is the treatment it belongs to."""

    verdict: Verdict
    rule: Verdict
    flags: tuple[Flag, ...]
    reason: str
    variant: Variant


def _rule_and_flags(m: Measured, band: float) -> Judgement:
    found = {"stored": _weigh(m, m.stored, band)}
    if m.carried is not None:
        found["carried"] = _weigh(m, m.carried, band)
    order = sorted(found, key=lambda name: -found[name].verdict.rank)
    worst = found[order[0]]
    flags, reason = list(worst.flags), worst.reason
    if len({f.verdict for f in found.values()}) > 1:
        flags.append(Flag.OLD_SENSITIVE)
        told = ", ".join(f"{f.verdict} with {name} ones" for name, f in found.items())
        reason += f"; old log-probabilities decide ({told}), the worse counts"
    if m.changes_unit and worst.variant.quiet_scale is None:
        flags.append(Flag.UNIT_UNCHECKED)
        reason += (
            "; the method changes the unit of the loss and no quiet control tells by how much, "
            "so ratio_scaled is not known"
        )
    if m.beyond_budget:
        flags.append(Flag.BEYOND_BUDGET)
        reason += f"; on the quiet control beyond the budget: {', '.join(m.beyond_budget)}"
    return Judgement(
        verdict=worst.verdict,
        reason=reason,
        noise_band=band,
        rule=worst.rule,
        flags=tuple(flags),
        below_detector=_below_detector(m, worst.variant.norm),
        ratio_scaled=_ratio_scaled(m, worst.variant),
        old=tuple(_old_finding(m, name, found[name]) for name in order),
    )


def _old_finding(m: Measured, name: str, found: _Finding) -> OldFinding:
    norm = found.variant.norm
    ratio = ratio_of(norm, m.median_norm)
    assert ratio is not None  # behind the gates
    return OldFinding(
        old=name,
        norm=norm,
        ratio=ratio,
        reduction=reduction_of(norm, found.variant.compared_norm),
        retained=found.variant.retained,
        verdict=found.verdict,
    )


def _weigh(m: Measured, variant: Variant, band: float) -> _Finding:
    """Rule, noise and retained shares for one variant; a changed unit is judged both ways."""
    finding = _weigh_norm(m, variant, variant.norm, band, "")
    scale = variant.quiet_scale
    if m.changes_unit and scale is not None:
        scaled = variant.norm / scale if scale > 0 else math.inf
        label = f"in the unit of the quiet control (x {scale:.4g}) "
        other = _weigh_norm(m, variant, scaled, band, label)
        finding = max(finding, other, key=lambda f: f.verdict.rank)
    return finding


def _weigh_norm(m: Measured, variant: Variant, norm: float, band: float, label: str) -> _Finding:
    assert m.median_norm is not None
    ruled = rule(
        norm,
        m.median_norm,
        variant.compared_norm,
        target_ratio=m.target_ratio,
        recording_reduction=m.recording_reduction,
    )
    verdict, flags = ruled, []
    reason = label + _told(m, norm, variant.compared_norm, ruled)
    near = _threshold_inside(m, norm, variant.compared_norm, band)
    if near is not None:
        verdict, reason = Verdict.INCONCLUSIVE, f"{reason}; {near}"
        flags.append(Flag.INCONCLUSIVE)
    lost = _lost_signal(variant.retained)
    if lost is not None:
        verdict, reason = Verdict.DEGENERATE, f"{reason}; {lost}"
        flags.append(Flag.DEGENERATE)
    return _Finding(verdict, ruled, tuple(flags), reason, variant)


def _told(m: Measured, norm: float, compared: float, ruled: Verdict) -> str:
    ratio, reduction = ratio_of(norm, m.median_norm), reduction_of(norm, compared)
    less = _under(reduction)
    head = f"norm {norm:.7g} is {ratio:.3f} x the median {m.median_norm:.7g}"
    against = f"{less} the compared norm {compared:.7g}"
    if ruled is Verdict.PASS:
        return f"{head}, at or under the target {m.target_ratio:g}, and {against}"
    needed = f"{m.recording_reduction:.0%} are worth recording"
    joint = "but" if ruled is Verdict.PARTIAL else "and"
    return f"{head}, above the target {m.target_ratio:g}, {joint} {against} ({needed})"


def _under(reduction: float | None) -> str:
    if reduction is None:
        return "not comparable with"
    return f"{abs(reduction):.1%} {'over' if reduction < 0 else 'under'}"


def _threshold_inside(m: Measured, norm: float, compared: float, band: float) -> str | None:
    """Which deciding threshold lies inside the noise band around ``norm``, told; None if none."""
    assert m.median_norm is not None
    target = m.target_ratio * m.median_norm
    recording = (1.0 - m.recording_reduction) * compared
    deciding = [("target", target)]
    if norm > target:  # under the target the reduction decides nothing
        deciding.append(("recording", recording))
    for name, threshold in deciding:
        distance = relative_difference(norm, threshold)
        if distance is not None and distance <= band:
            return (
                f"it lies {distance:.2g} relative from the {name} threshold {threshold:.7g}, "
                f"inside the noise band {band:.2g}"
            )
    return None


def _lost_signal(retained: Retained | None) -> str | None:
    """Why the method keeps too little of the signal, told; None if it keeps enough."""
    if retained is None or retained.smallest >= SMALLEST_SHARE:
        return None
    shares = ", ".join(f"{name} {value:.1%}" for name, value in retained)
    return f"it keeps too little of the signal ({shares}; {SMALLEST_SHARE:.0%} are needed)"


def _below_detector(m: Measured, norm: float) -> bool | None:
    if m.spike_ratio is None or m.median_norm is None:
        return None
    return not is_spike(norm, m.median_norm, m.spike_ratio)


def _ratio_scaled(m: Measured, variant: Variant) -> float | None:
    scale = variant.quiet_scale
    if not m.changes_unit or scale is None or not scale > 0:
        return None
    return ratio_of(variant.norm / scale, m.median_norm)
