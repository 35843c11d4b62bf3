"""An outcome becomes a result: which numbers are compared with which."""

from __future__ import annotations

import dataclasses

import pytest
from make_results import BASELINE, INFO, KEPT, RECORDED, case, outcome, result

from replay_lib.record.judge import Comparison, Traits, same_part
from replay_lib.record.result import Result
from replay_lib.record.table import document_table
from replay_lib.rule import Flag, Status, Verdict

HEAD = [
    *("case", "experiment", "mitigations", "against", "fidelity", "grad_norm_preclip"),
    *("median_norm", "ratio", "compared_norm", "reduction", "verdict", "reason"),
    *("below_detector", "retained", "touched", "noise_band", "deterministic", "device"),
    *("versions", "seconds"),
]


def test_keys_of_a_result_come_in_their_order() -> None:
    assert list(result(BASELINE).as_json())[: len(HEAD)] == HEAD


def test_numbers_of_a_pass() -> None:
    one = result(outcome("cap:at=2.0", 2.4, retained=KEPT))
    assert (one.experiment, one.against) == ("cap:at=2.0", "baseline")
    assert (one.ratio, one.compared_norm) == (1.2, 8.0)
    assert one.reduction == pytest.approx(0.7)
    assert (one.verdict, one.rule, one.below_detector) == (Verdict.PASS, Verdict.PASS, True)
    assert one.touched == {"settings": 1}
    assert (one.deterministic, one.repeat_spread) == (True, 0.0)
    assert one.status is Status.PROVEN
    assert not one.red


def test_the_baseline_is_judged_by_its_own_word() -> None:
    one = result(BASELINE)
    assert (one.verdict, one.wanted, one.status, one.red) == (
        Verdict.REPRODUCED,
        (Verdict.REPRODUCED,),
        None,
        False,
    )
    off = dataclasses.replace(RECORDED, norm=9.0)
    assert result(BASELINE, recorded=off).red


def test_against_compares_with_another_experiment() -> None:
    control = outcome("policy-only", 6.0)
    beside = Comparison(baseline=BASELINE, repeats=(BASELINE,), compared=control)
    one = result(outcome("policy-only+mask", 5.4, against="policy-only"), beside=beside)
    assert (one.against, one.compared_norm) == ("policy-only", 6.0)
    assert one.reduction == pytest.approx(0.1)
    assert one.verdict is Verdict.FAIL  # against the baseline it would be partial
    same = result(outcome("policy-only+mask", 6.0, against="policy-only"), beside=beside)
    assert (same.verdict, same.reason[-11:]) == (Verdict.NO_OP, "policy-only")


def test_carried_old_log_probabilities_are_compared_with_carried_ones() -> None:
    control = outcome("current-routes", 6.0, grad_norm_preclip_carried=4.5)
    beside = Comparison(baseline=BASELINE, repeats=(BASELINE,), compared=control)
    routed = outcome("x", 4.0, grad_norm_preclip_carried=4.4, against="current-routes")
    one = result(routed, beside=beside)
    assert (one.verdict, one.flags) == (Verdict.FAIL, (Flag.OLD_SENSITIVE,))
    assert one.old[0].old == "carried"
    assert one.old[0].reduction == pytest.approx(1 - 4.4 / 4.5)
    assert one.status is Status.NEGATIVE


def test_shares_retained_with_carried_old_log_probabilities_count_too() -> None:
    lost = KEPT.model_copy(update={"dloss_dlogprob": 0.2})
    routed = outcome("x", 2.4, grad_norm_preclip_carried=2.4, retained=KEPT, retained_carried=lost)
    one = result(routed)
    assert (one.verdict, one.old[0].old) == (Verdict.DEGENERATE, "carried")
    assert one.flags == (Flag.DEGENERATE, Flag.OLD_SENSITIVE)


def test_two_baselines_that_differ_are_not_deterministic_and_widen_the_band() -> None:
    again = outcome("baseline", 8.4, digest="another")
    beside = Comparison(baseline=BASELINE, repeats=(again,), compared=BASELINE)
    one = result(outcome("cap", 2.9), beside=beside)
    assert one.deterministic is False
    assert (one.repeats, one.repeat_spread) == (2, pytest.approx(0.4 / 8.2))
    assert one.noise_band == one.repeat_spread
    assert one.verdict is Verdict.INCONCLUSIVE


def test_the_spread_is_that_of_all_baselines_whichever_came_first() -> None:
    norms = (8.0, 8.01, 7.98, 8.0)
    again = tuple(outcome("baseline", n) for n in norms)
    one = result(BASELINE, beside=Comparison(baseline=BASELINE, repeats=again, compared=BASELINE))
    assert (one.repeats, one.deterministic) == (5, False)
    assert one.noise_band == one.repeat_spread == pytest.approx(0.03 / 8.0)
    steady = Comparison(baseline=BASELINE, repeats=(BASELINE,) * 3, compared=BASELINE)
    same = result(BASELINE, beside=steady)
    assert (same.repeats, same.deterministic, same.repeat_spread) == (4, True, 0.0)
    assert same.noise_band == 1e-5  # the table's


def test_one_baseline_that_is_not_finite_leaves_no_band() -> None:
    broken = outcome("baseline", float("nan"))
    beside = Comparison(baseline=BASELINE, repeats=(BASELINE, broken), compared=BASELINE)
    assert result(outcome("cap", 2.4), beside=beside).verdict is Verdict.INCONCLUSIVE


def test_of_several_expected_verdicts_any_will_do() -> None:
    verdicts = {"verdicts": ["no_op", "fail"], "reason": "ratios are 1 up to rounding"}
    either = case(expected={"halve": verdicts})
    found = result(outcome("halve", 7.9), case=either)
    assert (found.comparison, found.red) == ("as expected", False)
    assert found.as_json()["expected"] == ["no_op", "fail"]
    assert Result.model_validate_json(found.model_dump_json()) == found
    assert "expected" not in found.explain()
    better = result(outcome("halve", 6.0), case=either)
    assert better.explain().endswith("(better than expected: no_op or fail)")
    assert "better than no_op or fail" in document_table([better])


def test_expected_verdicts_are_the_cases() -> None:
    partly = case(expected={"halve": Verdict.PARTIAL})
    assert result(outcome("halve", 4.0), case=partly).comparison == "as expected"
    assert result(outcome("halve", 2.0), case=partly).comparison == "better"
    worse = result(outcome("halve", 7.9), case=partly)
    assert worse.red
    assert worse.explain() == (
        "tiny-step85 / halve: fail: norm 7.9 is 3.950 x the median 2, above the target 1.5, and "
        "1.2% under the compared norm 8 (15% are worth recording) (worse than expected: partial)"
    )
    assert result(outcome("other", 4.0), case=partly).red  # where nothing is stated: pass


def test_a_reduced_replay_has_its_own_tolerance_and_proves_nothing() -> None:
    reduced = INFO.model_copy(update={"fidelity": "reduced"})
    off = dataclasses.replace(RECORDED, norm=7.0)
    one = result(outcome("cap", 1.0, retained=KEPT), session=reduced, recorded=off)
    assert one.verdict is Verdict.PASS
    assert one.status is Status.PARTIAL


def test_a_run_in_bfloat16_is_not_held_to_float32() -> None:
    recorded = dataclasses.replace(RECORDED, norm=8.01, dtype="bfloat16")
    assert result(BASELINE, recorded=recorded).verdict is Verdict.REPRODUCED
    assert result(BASELINE, recorded=dataclasses.replace(recorded, dtype="float32")).red


def test_an_answer_after_the_norm_shows_its_postclip_norm() -> None:
    one = result(outcome("clip-harder", 8.0, touched={}), traits=Traits(after_norm=True))
    assert one.verdict is Verdict.NOT_APPLICABLE
    assert one.postclip_norm == pytest.approx(1.0, rel=1e-6)


def test_a_nan_norm_is_its_own_verdict() -> None:
    one = result(outcome("poison", float("nan"), nonfinite=("advantage of row 1, token 7",)))
    assert (one.verdict, one.red) == (Verdict.NON_FINITE, True)
    assert one.as_json()["grad_norm_preclip"] == "NaN"


def test_a_result_tells_whose_loss_and_what_replayed_it():
    told = result(outcome("halve", 2.0, retained=KEPT))
    assert (told.trainer, told.backend, told.status) == ("grpo", "native", Status.PROVEN)
    elsewhere = INFO.model_copy(update={"trainer": "axrl", "backend": "axrl"})
    other = result(outcome("halve", 2.0), session=elsewhere)
    assert (other.trainer, other.backend, other.verdict) == ("axrl", "axrl", Verdict.PASS)
    assert other.status is None  # nobody measured how much of the signal it keeps
    diagnostic = result(outcome("halve", 2.0), session=elsewhere, traits=Traits(diagnostic=True))
    assert diagnostic.status is Status.DIAGNOSTIC


def test_a_half_that_changed_nothing_is_named() -> None:
    alone = outcome("halve", 4.0)
    both = outcome("halve+cap", 4.0, idle=("cap",))
    assert same_part(both, [BASELINE, alone, both]) == "halve"
    assert same_part(both, [BASELINE, outcome("halve", 4.0, digest="another"), both]) is None
    assert same_part(alone, [BASELINE, alone]) is None
    beside = Comparison(baseline=BASELINE, compared=BASELINE, same_part="halve")
    told = result(both, beside=beside)
    assert told.idle == ("cap",)
    assert told.reason.endswith(
        "; cap changed nothing; the gradient is bit-equal to that of halve alone"
    )
    assert "changed nothing" not in result(outcome("halve+cap", 4.5)).reason
