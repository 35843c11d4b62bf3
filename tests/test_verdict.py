"""Every verdict, told apart, with its reason."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from replay_lib.engine.protocol import Retained
from replay_lib.noise import Noise, noise_of
from replay_lib.rule import Flag, Verdict, rule
from replay_lib.verdict import GATES, Bound, Measured, Variant, judge

ALL_KEPT = Retained(tokens=1.0, advantage=0.9, dloss_dlogprob=0.8)

# a spike of 4 x the median, and a method that brings it to 1.2 x
GOOD = Measured(
    recorded_norm=8.0,
    median_norm=2.0,
    spike_ratio=2.0,
    baseline_norm=8.0,
    repeat_spread=0.0,
    tolerance=Bound(1e-5, "float32 sums in another order"),
    noise=noise_of("float32", "cpu"),
    stored=Variant(norm=2.4, compared_norm=8.0, retained=ALL_KEPT),
    touched=7,
)


def but(**changes: Any) -> Measured:
    """GOOD with some things changed."""
    return dataclasses.replace(GOOD, **changes)


def with_norm(norm: float, **changes: Any) -> Measured:
    return but(stored=dataclasses.replace(GOOD.stored, norm=norm), **changes)


# --- gates -----------------------------------------------------------------------------------

ALL_WRONG = but(
    recorded_norm=None,
    median_norm=0.0,
    nonfinite=("loss",),
    baseline_norm=2.5,
    touched=0,
    stored=Variant(norm=2.5, compared_norm=2.5),
)
REPAIRS: list[tuple[Verdict, dict[str, Any]]] = [
    (Verdict.REFERENCE_MISSING, {"recorded_norm": 8.0}),
    (Verdict.RATIO_UNDEFINED, {"median_norm": 2.0}),
    (Verdict.NON_FINITE, {"nonfinite": ()}),
    (Verdict.NOT_REPRODUCED, {"recorded_norm": 2.5}),
    (Verdict.NOT_A_SPIKE, {"recorded_norm": 8.0, "baseline_norm": 8.0}),
    (Verdict.NO_OP, {"touched": 1}),
]


def test_gates_speak_in_their_order_each_for_its_own_reason() -> None:
    assert [verdict for verdict, _ in GATES] == [verdict for verdict, _ in REPAIRS]
    measured = ALL_WRONG
    for verdict, repair in REPAIRS:
        judgement = judge(measured)
        assert (judgement.verdict, judgement.rule) == (verdict, None), judgement.reason
        measured = dataclasses.replace(measured, **repair)
    assert judge(measured).rule is not None


@pytest.mark.parametrize("median", [None, 0.0, -1.0, math.nan, math.inf])
def test_no_ratio_without_a_median(median: float | None) -> None:
    judgement = judge(but(median_norm=median))
    told = "missing" if median is None else repr(median)
    assert judgement.verdict is Verdict.RATIO_UNDEFINED
    assert judgement.reason == f"the median norm is {told}, so no ratio exists"


@pytest.mark.parametrize("recorded", [None, math.nan, math.inf, 0.0, -8.0])
def test_a_missing_reference_is_never_reproduced(recorded: float | None) -> None:
    assert judge(but(recorded_norm=recorded)).verdict is Verdict.REFERENCE_MISSING
    assert judge(but(recorded_norm=recorded, is_baseline=True)).verdict is Verdict.REFERENCE_MISSING


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_is_named(bad: float) -> None:
    one = judge(with_norm(bad))
    assert (one.verdict, one.reason) == (Verdict.NON_FINITE, f"not finite: norm {bad}")
    assert judge(but(baseline_norm=bad)).reason == f"not finite: baseline {bad}"
    assert judge(but(carried=Variant(norm=bad, compared_norm=8.0))).verdict is Verdict.NON_FINITE
    compared = judge(but(stored=dataclasses.replace(GOOD.stored, compared_norm=bad)))
    assert compared.reason == f"not finite: compared norm {bad}"
    carried = judge(but(carried=dataclasses.replace(GOOD.stored, compared_norm=bad)))
    assert (carried.verdict, carried.reason) == (
        Verdict.NON_FINITE,
        f"not finite: compared norm with carried old log-probabilities {bad}",
    )
    assert judge(but(nonfinite=("advantage of row 3, token 5",))).reason == (
        "not finite: advantage of row 3, token 5"
    )


def test_tolerance_is_inclusive_and_one_ulp_beyond_is_red() -> None:
    recorded = 8.0
    edge = recorded * (1 + 0.25)  # exact in binary
    exact = but(tolerance=Bound(0.25, "a power of two"), recorded_norm=recorded)
    beyond = math.nextafter(edge, math.inf)
    assert judge(dataclasses.replace(exact, baseline_norm=edge)).rule is not None
    assert judge(dataclasses.replace(exact, baseline_norm=beyond)).verdict is Verdict.NOT_REPRODUCED


def test_a_patch_without_effect_is_no_op() -> None:
    assert judge(but(touched=0)).reason == "the patch touched nothing"
    same = judge(but(same_digest_as="the baseline"))
    assert same.verdict is Verdict.NO_OP
    assert same.reason == (
        "the patch touched 7 values, but the gradient is bit-equal to that of the baseline"
    )


def test_a_quiet_step_is_not_a_spike() -> None:
    quiet = but(recorded_norm=2.9, baseline_norm=2.9)
    assert judge(quiet).verdict is Verdict.NOT_A_SPIKE
    assert judge(quiet).reason == (
        "the baseline is 1.450 x the median already, at or under the target 1.5: "
        "there is nothing to mitigate"
    )


def test_a_step_exactly_at_the_target_is_no_spike_and_small_norms_are_norms() -> None:
    assert judge(but(recorded_norm=3.0, baseline_norm=3.0)).verdict is Verdict.NOT_A_SPIKE
    tiny = but(recorded_norm=0.5, baseline_norm=0.5, median_norm=0.125)
    assert judge(tiny).rule is not None


def test_what_is_said_of_a_missing_reference() -> None:
    assert judge(but(recorded_norm=None)).reason == (
        "the snapshot records no norm, so a replay has nothing to reproduce"
    )
    assert judge(but(recorded_norm=0.0)).reason.startswith("the snapshot records the norm 0.0, so")


# --- rule --------------------------------------------------------------------------------------


def test_pass_partial_fail() -> None:
    passing, partial, failing = (judge(with_norm(norm)) for norm in (2.4, 5.0, 7.5))
    assert (passing.verdict, partial.verdict, failing.verdict) == (
        Verdict.PASS,
        Verdict.PARTIAL,
        Verdict.FAIL,
    )
    assert passing.reason == (
        "norm 2.4 is 1.200 x the median 2, at or under the target 1.5, "
        "and 70.0% under the compared norm 8"
    )
    assert partial.reason == (
        "norm 5 is 2.500 x the median 2, above the target 1.5, "
        "but 37.5% under the compared norm 8 (15% are worth recording)"
    )
    assert failing.reason == (
        "norm 7.5 is 3.750 x the median 2, above the target 1.5, "
        "and 6.2% under the compared norm 8 (15% are worth recording)"
    )


def test_a_reduction_of_exactly_the_recording_threshold_is_partial() -> None:
    quarter = {"median": 0.25, "compared": 1.0, "recording_reduction": 0.25}  # exact in binary
    assert rule(0.75, **quarter) is Verdict.PARTIAL
    assert rule(math.nextafter(0.75, math.inf), **quarter) is Verdict.FAIL


def test_rule_never_passes_what_is_not_a_number() -> None:
    assert rule(math.nan, 2.0, 8.0) is Verdict.FAIL
    assert rule(2.0, math.nan, math.nan) is Verdict.FAIL
    assert rule(5.0, 2.0, None) is Verdict.FAIL


def test_the_compared_experiment_decides_the_reduction() -> None:
    controlled = but(stored=Variant(norm=5.0, compared_norm=5.5, retained=ALL_KEPT))
    assert judge(controlled).verdict is Verdict.FAIL


# --- what no verdict may hide ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "threshold"), [(3.00002, "target"), (2.99998, "target"), (6.80005, "recording")]
)
def test_inconclusive_inside_the_noise_band(norm: float, threshold: str) -> None:
    judgement = judge(with_norm(norm))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.flags == (Flag.INCONCLUSIVE,)
    assert f"from the {threshold} threshold" in judgement.reason


def test_the_noise_band_is_inclusive() -> None:
    wide = but(noise=Noise(0.25, "exact in binary"))
    at = dataclasses.replace(wide, stored=Variant(norm=3.75, compared_norm=8.0, retained=ALL_KEPT))
    assert judge(at).verdict is Verdict.INCONCLUSIVE
    beyond = dataclasses.replace(at.stored, norm=math.nextafter(3.75, 4.0))
    assert judge(dataclasses.replace(wide, stored=beyond)).verdict is Verdict.PARTIAL


@pytest.mark.parametrize(
    ("norm", "told"),
    [(8.0, "0.0% under"), (10.0, "25.0% over"), (20.0, "150.0% over"), (7.0, "12.5% under")],
)
def test_over_and_under_the_compared_norm(norm: float, told: str) -> None:
    assert f"and {told} the compared norm 8" in judge(with_norm(norm)).reason


def test_the_recording_threshold_decides_nothing_under_the_target() -> None:
    small = but(stored=Variant(norm=2.4, compared_norm=2.4 / 0.85, retained=ALL_KEPT))
    assert judge(small).verdict is Verdict.PASS


def test_noise_band_is_the_largest_of_three() -> None:
    assert judge(GOOD).noise_band == 1e-5  # the table
    assert judge(but(repeat_spread=0.01)).noise_band == 0.01
    assert judge(but(baseline_norm=8.00004)).noise_band == pytest.approx(5e-6, abs=1e-5)
    loose = but(baseline_norm=8.8, tolerance=Bound(0.2, "reduced"))
    assert judge(loose).noise_band == pytest.approx(0.1)
    assert judge(but(repeat_spread=math.nan)).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("share", ["tokens", "advantage", "dloss_dlogprob"])
@pytest.mark.parametrize("value", [0.49, 0.0, math.nan])
def test_degenerate_by_the_smallest_share(share: str, value: float) -> None:
    kept = ALL_KEPT.model_copy(update={share: value})
    judgement = judge(but(stored=Variant(norm=0.0, compared_norm=8.0, retained=kept)))
    assert (judgement.verdict, judgement.rule) == (Verdict.DEGENERATE, Verdict.PASS)
    assert f"{share} {value:.1%}" in judgement.reason


def test_half_of_the_signal_is_enough() -> None:
    kept = Retained(tokens=0.5, advantage=0.5, dloss_dlogprob=0.5)
    assert judge(but(stored=Variant(norm=2.4, compared_norm=8.0, retained=kept))).flags == ()


def test_old_sensitive_takes_the_worse() -> None:
    carried = Variant(norm=5.0, compared_norm=8.0, retained=ALL_KEPT)
    for stored, other in ((GOOD.stored, carried), (carried, GOOD.stored)):
        judgement = judge(but(stored=stored, carried=other))
        assert judgement.verdict is Verdict.PARTIAL
        assert judgement.flags == (Flag.OLD_SENSITIVE,)
        assert judgement.old[0].norm == 5.0
    both = judge(but(carried=GOOD.stored))
    assert (both.verdict, both.flags) == (Verdict.PASS, ())
    assert [one.old for one in both.old] == ["stored", "carried"]


def test_old_sensitive_where_only_one_of_the_two_is_degenerate() -> None:
    lost = ALL_KEPT.model_copy(update={"dloss_dlogprob": 0.1})
    carried = Variant(norm=2.4, compared_norm=8.0, retained=lost)
    judgement = judge(but(carried=carried))
    assert judgement.verdict is Verdict.DEGENERATE
    assert judgement.flags == (Flag.DEGENERATE, Flag.OLD_SENSITIVE)
    assert judgement.reason.endswith(
        "old log-probabilities decide (pass with stored ones, degenerate with carried ones), "
        "the worse counts"
    )


@pytest.mark.parametrize(("norm", "below"), [(3.9, True), (4.0, True), (4.1, False)])
def test_below_detector_uses_the_runs_own_ratio(norm: float, below: bool) -> None:
    assert judge(with_norm(norm)).below_detector is below
    assert judge(with_norm(norm, spike_ratio=1.1)).below_detector is False
    assert judge(with_norm(norm, spike_ratio=None)).below_detector is None


def test_below_detector_is_told_of_the_treatment_that_counts() -> None:
    worse = dataclasses.replace(GOOD.stored, norm=5.0)  # 2.5 x the median, detected above 2 x
    judgement = judge(but(carried=worse))
    assert (judgement.old[0].old, judgement.below_detector) == ("carried", False)
    judgement = judge(but(stored=worse, carried=GOOD.stored))
    assert (judgement.old[0].old, judgement.below_detector) == ("stored", False)
    assert judge(but(carried=GOOD.stored)).below_detector is True


def test_an_answer_after_the_norm_is_not_applicable() -> None:
    clipped = but(after_norm=True, touched=0, same_digest_as="the baseline")
    assert judge(clipped).verdict is Verdict.NOT_APPLICABLE


def in_another_unit(norm: float) -> Measured:
    """A method that takes the quiet control's norm to a tenth."""
    return but(
        stored=dataclasses.replace(GOOD.stored, norm=norm, quiet_scale=0.1), changes_unit=True
    )


def test_a_changed_unit_is_also_judged_in_the_quiet_controls_unit() -> None:
    # a tenth of the loss scale: nothing was cured
    shrunk = judge(in_another_unit(0.8))
    assert shrunk.ratio_scaled == pytest.approx(4.0)
    assert shrunk.verdict is Verdict.FAIL
    cured = judge(in_another_unit(0.24))
    assert (cured.ratio_scaled, cured.verdict) == (pytest.approx(1.2), Verdict.PASS)


def test_a_method_that_silences_the_quiet_control_has_no_norm_in_its_unit() -> None:
    stored = dataclasses.replace(GOOD.stored, norm=0.8, quiet_scale=0.0)
    judgement = judge(but(stored=stored, changes_unit=True))
    assert (judgement.verdict, judgement.ratio_scaled) == (Verdict.FAIL, None)
    doubled = dataclasses.replace(GOOD.stored, quiet_scale=2.0)
    assert judge(but(stored=doubled, changes_unit=True)).ratio_scaled == pytest.approx(0.6)


def test_a_quiet_control_is_not_asked_where_the_unit_stays() -> None:
    judgement = judge(but(stored=dataclasses.replace(GOOD.stored, quiet_scale=0.1)))
    assert (judgement.verdict, judgement.ratio_scaled) == (Verdict.PASS, None)


def test_a_changed_unit_without_a_quiet_control_says_so() -> None:
    judgement = judge(with_norm(0.8, changes_unit=True))
    assert judgement.flags == (Flag.UNIT_UNCHECKED,)
    assert judgement.reason.endswith(
        "no quiet control tells by how much, so ratio_scaled is not known"
    )


def test_each_treatment_of_old_log_probabilities_has_its_own_scale() -> None:
    carried = Variant(norm=0.6, compared_norm=8.0, retained=ALL_KEPT, quiet_scale=0.5)
    judgement = judge(dataclasses.replace(in_another_unit(0.24), carried=carried))
    assert judgement.ratio_scaled == pytest.approx(1.2)  # 0.24 / 0.1 and 0.6 / 0.5 over 2
    assert judgement.verdict is Verdict.PASS


def test_the_baseline_is_reproduced_or_a_gate_says_why_not() -> None:
    baseline = but(is_baseline=True, touched=0, same_digest_as="the baseline")
    judgement = judge(baseline)
    assert judgement.verdict is Verdict.REPRODUCED
    assert judgement.below_detector is False
    assert judgement.reason == (
        "the recorded norm came out within 0 relative (1e-05 is allowed), 4.000 x the median"
    )
