"""Budgets of the quiet control, and what recorded results make of a method."""

from __future__ import annotations

from typing import Any

import pytest
from make_results import BASELINE, INFO, KEPT, case, outcome, result

from replay_lib.case import Limit, Thresholds
from replay_lib.patch import Mitigation, settings_patch
from replay_lib.record.judge import Comparison, Recorded, Traits, judge_quiet, traits_of
from replay_lib.record.result import Result, SideEffect
from replay_lib.record.standing import standing_of
from replay_lib.rule import Flag, Status, Verdict

QUIET = Recorded(norm=2.0, median=2.0, spike_ratio=2.0, dtype="float32")
QUIET_BASELINE = outcome("baseline", 2.0)


def effect(norm: float, cosine: float | None, changes_unit: bool = False, **carried: Any) -> Any:
    """What a method does to a quiet step of norm 2."""
    return judge_quiet(
        outcome("cap", norm, cosine=cosine, **carried),
        baseline=QUIET_BASELINE,
        session=INFO,
        case=case(),
        recorded=QUIET,
        traits=Traits(changes_unit=changes_unit),
    )


def judged(side_effect: SideEffect | None, norm: float = 2.4, **fields: Any) -> Result:
    """A pass (8 to 2.4 at a median of 2) beside ``side_effect``."""
    beside = Comparison(
        baseline=BASELINE, repeats=(BASELINE,), compared=BASELINE, side_effect=side_effect
    )
    return result(outcome("cap", norm, retained=KEPT, cosine=0.9), beside=beside, **fields)


def test_a_method_within_both_budgets_is_proven() -> None:
    one = judged(effect(2.1, 0.97))
    assert (one.verdict, one.flags, one.status) == (Verdict.PASS, (), Status.PROVEN)
    assert one.side_effects_measured and "budget" not in one.reason


@pytest.mark.parametrize(
    ("norm", "cosine", "told"),
    [
        (2.25, 0.99, "norm +12.5% (10% is allowed)"),
        (1.75, 0.99, "norm -12.5% (10% is allowed)"),
        (2.0, 0.9, "cosine 0.900 (0.95 is needed)"),
        (3.0, -1.0, "norm +50.0% (10% is allowed), cosine -1.000 (0.95 is needed)"),
        (0.0, None, "norm -100.0% (10% is allowed), cosine undefined, the gradient is zero"),
    ],
)
def test_a_method_beyond_a_budget_says_which_and_is_not_proven(
    norm: float, cosine: float | None, told: str
) -> None:
    one = judged(effect(norm, cosine))
    assert (one.verdict, one.flags) == (Verdict.PASS, (Flag.BEYOND_BUDGET,))
    assert one.status is Status.PARTIAL
    assert f"; on the quiet control beyond the budget: {told}" in one.reason


def test_carried_old_log_probabilities_count_too() -> None:
    found = effect(2.0, 1.0, grad_norm_preclip_carried=2.5, cosine_carried=0.99)
    assert found.beyond_budget == ("norm +25.0% (10% is allowed)",)
    found = effect(2.0, 1.0, grad_norm_preclip_carried=2.0, cosine_carried=0.5)
    assert found.beyond_budget == ("cosine 0.500 (0.95 is needed)",)


def test_a_method_that_changes_the_unit_is_held_to_the_cosine_alone() -> None:
    halved = effect(1.0, 1.0, changes_unit=True)
    assert halved.beyond_budget == () and halved.change == -0.5
    one = judged(halved, norm=1.2, traits=Traits(changes_unit=True))  # 2.4 in the quiet unit
    assert (one.verdict, one.status) == (Verdict.PASS, Status.PROVEN)
    assert effect(1.0, 0.5, changes_unit=True).beyond_budget
    assert effect(0.0, None, changes_unit=True).beyond_budget  # nothing is left of the step


def test_a_case_has_budgets_of_its_own() -> None:
    loose = Thresholds(
        quiet_norm_change=Limit(value=0.6, reason="x"), quiet_cosine=Limit(value=0.4, reason="x")
    )
    found = judge_quiet(
        outcome("cap", 3.0, cosine=0.5),
        baseline=QUIET_BASELINE,
        session=INFO,
        case=case(thresholds=loose),
        recorded=QUIET,
    )
    assert found.beyond_budget == () and (found.budget, found.cosine_budget) == (0.6, 0.4)


def test_the_reason_tells_the_cosine_on_the_spike() -> None:
    one = judged(None)
    assert one.explain().endswith("; cosine to the unpatched gradient 0.900")
    carried = one.model_copy(update={"cosine_carried": -0.25})
    assert carried.explain().endswith("0.900 (-0.250 with carried old log-probabilities)")
    gated = result(outcome("cap", 8.0, cosine=1.0))
    assert (gated.verdict, "cosine" in gated.explain()) == (Verdict.NO_OP, False)


def test_degenerate_and_faulty_quiet_controls_prove_nothing() -> None:
    lost = KEPT.model_copy(update={"tokens": 0.4})
    beside = Comparison(baseline=BASELINE, compared=BASELINE, side_effect=effect(2.0, 1.0))
    degenerate = result(outcome("cap", 2.4, retained=lost), beside=beside)
    assert (degenerate.verdict, degenerate.status) == (Verdict.DEGENERATE, Status.NEGATIVE)
    refused = judged(SideEffect(reason="no such column"))
    assert (refused.verdict, refused.status) == (Verdict.PASS, Status.PARTIAL)


def test_without_a_quiet_control_a_pass_proves_and_says_what_is_not_known() -> None:
    one = judged(None)
    assert one.status is Status.PROVEN and not one.side_effects_measured
    assert standing_of("cap", [one]).told() == "proven (1 of 1 recorded; side effects not measured)"
    # one that was measured speaks for both
    other = judged(effect(2.0, 1.0), case=case().model_copy(update={"name": "other"}))
    assert standing_of("cap", [one, other]).told() == "proven (2 of 2 recorded)"


def test_a_method_stands_by_its_best_result_and_says_what_holds_it_back() -> None:
    loud = judged(effect(3.0, 1.0))
    failed = judged(None, norm=7.9, case=case().model_copy(update={"name": "other"}))
    assert failed.status is Status.NEGATIVE
    told = standing_of("cap", [loud, failed]).told()
    assert told == "partial (1 of 2 recorded; a pass is held back by beyond_budget)"
    assert standing_of("cap", [failed]).told() == "negative (1 of 1 recorded)"
    assert standing_of("else", [loud]).status is None


def test_of_several_results_the_last_counts() -> None:
    proven, failed = judged(effect(2.0, 1.0)), judged(None, norm=7.9)
    assert standing_of("cap", [proven, failed]).status is Status.NEGATIVE
    assert standing_of("cap", [failed, proven]).status is Status.PROVEN


def test_traits_of_several_methods_are_taken_together() -> None:
    def method(slug: str, **declared: bool) -> Mitigation:
        given = {"diagnostic": False, "changes_unit": False} | declared
        return Mitigation(
            slug=slug,
            family="settings",
            summary="",
            source="",
            build=lambda: settings_patch(loss_type="grpo"),
            **given,
        )

    known = {"a": method("a", changes_unit=True), "b": method("b", diagnostic=True)}
    both = traits_of(outcome("a+b", 1.0).experiment.mitigations, known)
    assert both == Traits(diagnostic=True, changes_unit=True)
    assert traits_of((), known) == Traits()
