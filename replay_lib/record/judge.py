"""Outcome of a replay + session + case -> Result."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment, MitigationCall, Outcome, SessionInfo
from replay_lib.methods import find
from replay_lib.noise import noise_of, spread
from replay_lib.patch import AfterNorm, Mitigation, Norms, clip_coefficient, clipped
from replay_lib.record.layer_norms import layer_norms
from replay_lib.record.result import OldResult, Result, SideEffect
from replay_lib.rule import Verdict, ratio_of, reduction_of, relative_difference
from replay_lib.verdict import Judgement, Measured, Variant, judge


@dataclass(frozen=True)
class Recorded:
    """What the snapshot states about its step; norms are L2 before clipping.

    ``dtype`` is that of the recorded run's parameters, ``spike_ratio`` its detector's setting,
    ``clip_grad`` the norm at which the run clipped (None or 0: not at all).
    """

    norm: float | None
    median: float | None
    spike_ratio: float | None
    dtype: str
    clip_grad: float | None = None


@dataclass(frozen=True)
class Traits:
    """What an experiment's methods declare about themselves, taken together."""

    diagnostic: bool = False
    changes_unit: bool = False
    after_norm: bool = False
    answers: tuple[AfterNorm, ...] = ()


def traits_of(calls: Sequence[MitigationCall], methods: Mapping[str, Mitigation]) -> Traits:
    """The traits of ``calls`` together; what one of them changes, all of them change."""
    used = [find(call.slug, methods) for call in calls]
    answers = (method.answer(call.params) for method, call in zip(used, calls, strict=True))
    return Traits(
        diagnostic=any(m.diagnostic for m in used),
        changes_unit=any(m.changes_unit for m in used),
        after_norm=bool(used) and all(m.after_norm for m in used),
        answers=tuple(answer for answer in answers if answer is not None),
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The replays that one outcome is judged beside.

    ``repeats`` are the further replays of ``baseline`` in the same session. ``compared`` is the
    outcome of the experiment named by ``against``, ``same_part`` a part of a combination that gave
    the bit-equal gradient when it was replayed alone, ``side_effect`` what this experiment does to
    the quiet control, ``quiet_param_norms`` the norms of that step's parameters with nothing
    patched.
    """

    baseline: Outcome
    repeats: tuple[Outcome, ...] = ()
    compared: Outcome
    same_part: str | None = None
    side_effect: SideEffect | None = None
    quiet_param_norms: Mapping[str, float] | None = None

    @property
    def deterministic(self) -> bool:
        """Whether all baselines are bit-equal: seen, not trusted from a flag."""
        return all(again.digest == self.baseline.digest for again in self.repeats)

    @property
    def repeat_spread(self) -> float:
        """(largest - smallest) / median of the baselines' norms; NaN where one is not finite."""
        return spread([o.grad_norm_preclip for o in (self.baseline, *self.repeats)])


def label_of(calls: Sequence[MitigationCall]) -> str:
    """The name of an experiment that applies ``calls``."""
    return Experiment(mitigations=tuple(calls)).name


def judge_outcome(
    outcome: Outcome,
    *,
    beside: Comparison,
    session: SessionInfo,
    case: Case,
    recorded: Recorded,
    traits: Traits = Traits(),
) -> Result:
    """The result of one experiment, with its verdict."""
    measured = _measured(
        outcome, beside=beside, session=session, case=case, recorded=recorded, traits=traits
    )
    judgement = judge(measured)
    name = outcome.experiment.name
    # a part of the ranks is another batch: what a case expects is of all of them
    expected = None if session.fidelity == "reduced" else case.expected.get(name)
    norm = outcome.grad_norm_preclip
    compared = beside.compared.grad_norm_preclip
    return Result(
        case=case.name,
        experiment=name,
        mitigations=outcome.experiment.mitigations,
        against=label_of(outcome.experiment.against),
        fidelity=session.fidelity,
        grad_norm_preclip=norm,
        median_norm=recorded.median,
        ratio=ratio_of(norm, recorded.median),
        compared_norm=compared,
        reduction=reduction_of(norm, compared),
        verdict=judgement.verdict,
        reason=judgement.reason + _told_parts(outcome, beside.same_part),
        below_detector=judgement.below_detector,
        retained=outcome.retained,
        touched={str(seam): count for seam, count in outcome.touched.items()},
        noise_band=judgement.noise_band,
        deterministic=beside.deterministic,
        device=session.device,
        versions=session.versions,
        seconds=outcome.seconds,
        # what replays elsewhere may not tell it
        denominator=outcome.denominator if math.isfinite(outcome.denominator) else None,
        dtype=session.dtype,
        digest=outcome.digest,
        rule=judgement.rule,
        flags=judgement.flags,
        old=_old(judgement),
        recorded_norm=recorded.norm,
        relative_difference=relative_difference(beside.baseline.grad_norm_preclip, recorded.norm),
        repeats=1 + len(beside.repeats),
        repeat_spread=beside.repeat_spread,
        ratio_scaled=judgement.ratio_scaled,
        cosine=outcome.cosine,
        cosine_carried=outcome.cosine_carried,
        idle=outcome.idle,
        side_effect=beside.side_effect,
        postclip_norm=_postclip(outcome, beside, recorded, traits),
        clip_coefficient=clip_coefficient(norm, recorded.clip_grad),
        nonfinite=outcome.nonfinite,
        diagnostic=traits.diagnostic,
        evidence=case.provenance.evidence,
        expected=None if expected is None else expected.stated,
        dp_ranks=session.dp_ranks,
        dp_recorded=session.dp_recorded,
        layout=session.layout,
        notes=session.notes + outcome.notes,
        differences=tuple(d for d in session.differences if d.matters),
        trainer=session.trainer,
        backend=session.backend,
        layer_norms=layer_norms(outcome.param_norms),
        target_ratio=case.thresholds.target_ratio.value,
        detector_ratio=recorded.spike_ratio,
        timestamp=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def judge_quiet(
    outcome: Outcome,
    *,
    baseline: Outcome,
    session: SessionInfo,
    case: Case,
    recorded: Recorded,
    traits: Traits = Traits(),
) -> SideEffect:
    """What one experiment does to the quiet control, and the verdict there.

    ``outcome`` and ``baseline`` are replays of the quiet control in ``session``, ``recorded`` what
    that snapshot states. The quiet control is judged by the case's own target and tolerance.
    Where ``traits`` say that the unit of the loss changes, no budget bounds the norm: its change
    is the unit's, times what the method does, and one step does not tell them apart.
    """
    norm, quiet = outcome.grad_norm_preclip, baseline.grad_norm_preclip
    beside = Comparison(baseline=baseline, compared=baseline)
    judgement = judge(
        _measured(
            outcome, beside=beside, session=session, case=case, recorded=recorded, traits=Traits()
        )
    )
    carried = outcome.grad_norm_preclip_carried
    return SideEffect(
        quiet_norm=norm,
        quiet_baseline_norm=quiet,
        change=_change(norm, quiet),
        verdict=judgement.verdict,
        reason=_quiet_reason(judgement, ratio_of(quiet, recorded.median), case),
        quiet_norm_carried=carried,
        change_carried=None if carried is None else _change(carried, quiet),
        budget=None if traits.changes_unit else case.thresholds.quiet_norm_change.value,
        cosine=outcome.cosine,
        cosine_carried=outcome.cosine_carried,
        cosine_budget=case.thresholds.quiet_cosine.value,
    )


def _change(norm: float, baseline: float) -> float | None:
    ratio = ratio_of(norm, baseline)
    return None if ratio is None else ratio - 1.0


def _quiet_reason(judgement: Judgement, ratio: float | None, case: Case) -> str:
    """A gate's own reason; behind the gates the baseline alone counts, whatever the method did."""
    if judgement.verdict.rank >= Verdict.NOT_A_SPIKE.rank:
        return judgement.reason
    target = case.thresholds.target_ratio.value
    return f"its baseline is {ratio:.3f} x the median, above the target {target:g}"


def _measured(
    outcome: Outcome,
    *,
    beside: Comparison,
    session: SessionInfo,
    case: Case,
    recorded: Recorded,
    traits: Traits,
) -> Measured:
    return Measured(
        recorded_norm=recorded.norm,
        median_norm=recorded.median,
        spike_ratio=recorded.spike_ratio,
        baseline_norm=beside.baseline.grad_norm_preclip,
        repeat_spread=beside.repeat_spread,
        tolerance=case.tolerance_for(session.fidelity, {recorded.dtype, session.dtype}),
        noise=noise_of(session.dtype, session.device),
        stored=Variant(
            norm=outcome.grad_norm_preclip,
            compared_norm=beside.compared.grad_norm_preclip,
            retained=outcome.retained,
            quiet_scale=beside.side_effect.scale("stored") if beside.side_effect else None,
        ),
        carried=_carried(outcome, beside),
        is_baseline=not outcome.experiment.mitigations,
        nonfinite=outcome.nonfinite,
        touched=sum(outcome.touched.values()),
        same_digest_as=_same_digest(outcome, beside),
        changes_unit=traits.changes_unit,
        after_norm=traits.after_norm,
        beyond_budget=beside.side_effect.beyond_budget if beside.side_effect else (),
        target_ratio=case.thresholds.target_ratio.value,
        recording_reduction=case.thresholds.recording_reduction.value,
    )


def _carried(outcome: Outcome, beside: Comparison) -> Variant | None:
    if outcome.grad_norm_preclip_carried is None:
        return None
    compared, effect = beside.compared, beside.side_effect
    other = compared.grad_norm_preclip_carried
    return Variant(
        norm=outcome.grad_norm_preclip_carried,
        compared_norm=compared.grad_norm_preclip if other is None else other,
        retained=outcome.retained_carried,
        quiet_scale=effect.scale("carried") if effect else None,
    )


def same_part(outcome: Outcome, known: Iterable[Outcome]) -> str | None:
    """The part of a combination that gave its bit-equal gradient, among what is ``known``."""
    calls = set(outcome.experiment.mitigations)
    for other in known:
        part = set(other.experiment.mitigations)
        if part and part < calls and other.digest == outcome.digest:
            return other.experiment.name
    return None


def _told_parts(outcome: Outcome, same_part: str | None) -> str:
    """Of a combination: which of its methods changed nothing, and what it is equal to."""
    told = f"; {', '.join(outcome.idle)} changed nothing" if outcome.idle else ""
    return told + (f"; the gradient is bit-equal to that of {same_part} alone" if same_part else "")


def _same_digest(outcome: Outcome, beside: Comparison) -> str | None:
    for other in (beside.baseline, beside.compared):
        if outcome.digest == other.digest:
            return f"the {name}" if (name := other.experiment.name) == "baseline" else name
    return None


def _old(judgement: Judgement) -> tuple[OldResult, ...]:
    return tuple(
        OldResult(
            old="carried" if found.old == "carried" else "stored",
            grad_norm_preclip=found.norm,
            ratio=found.ratio,
            reduction=found.reduction,
            retained=found.retained,
            verdict=found.verdict,
        )
        for found in judgement.old
    )


def _postclip(
    outcome: Outcome, beside: Comparison, recorded: Recorded, traits: Traits
) -> float | None:
    """The norm that answers after it let through, one after the other.

    An experiment that names no answer of its own gets the run's own clip. None: an answer cannot
    tell from one step.
    """
    norm = outcome.grad_norm_preclip
    if not traits.answers:
        return clipped(norm, recorded.clip_grad)
    for answer in traits.answers:
        left = answer(
            Norms(
                norm=norm,
                median=recorded.median,
                clip_grad=recorded.clip_grad,
                param_norms=outcome.param_norms,
                quiet_param_norms=beside.quiet_param_norms,
            )
        )
        if left is None:
            return None
        norm = left
    return norm
