"""Which result is recorded, and which never is."""

from __future__ import annotations

import pytest

from replay_lib.errors import UsageError
from replay_lib.method_cards.candidate import choose, refusals
from replay_lib.record import ledger
from replay_lib.record.result import SideEffect
from replay_lib.rule import Flag, Status, Verdict
from tests.method_cards.make_cards import JOB, METHOD, result, task_with
from tests.report.make_task import facts


def test_a_proven_result_is_chosen_with_its_status(tmp_path):
    chosen = choose(facts(task_with(tmp_path, result())), METHOD, None)
    assert (chosen.result.experiment, chosen.status) == (METHOD, Status.PROVEN)
    assert refusals(chosen.result) == []


def test_the_last_result_on_a_case_counts_and_of_several_cases_the_best(tmp_path):
    partial = {"verdict": Verdict.PARTIAL, "case": "b-case", "grad_norm_preclip": 0.1}
    worse = {"verdict": Verdict.FAIL, "case": "c-case"}
    results = [result(), result(**partial), result(**worse), result(**worse)]
    chosen = choose(facts(task_with(tmp_path, *results)), METHOD, None)
    assert chosen.result.case == "zoo-natural" and len(chosen.attempts) == 3
    later = result(verdict=Verdict.FAIL)
    chosen = choose(facts(task_with(tmp_path, later)), METHOD, None)
    assert chosen.result.case == "b-case"


def test_several_sets_of_parameters_are_listed_and_never_guessed(tmp_path):
    task = task_with(tmp_path, result(), result(params={"bound": 0.2}))
    with pytest.raises(UsageError) as caught:
        choose(facts(task), METHOD, None)
    assert str(caught.value) == (
        f"{METHOD}: found 2 experiments in {task.ledger}: {METHOD}; {METHOD}:bound=0.2; expected "
        "one. Name it with --experiment"
    )
    chosen = choose(facts(task), METHOD, f"{METHOD}:bound=0.2")
    assert chosen.experiment.mitigations[0].params == {"bound": 0.2}


def test_what_was_not_tried_alone_is_told_with_what_to_do(tmp_path):
    found = facts(task_with(tmp_path, result()))
    with pytest.raises(UsageError, match=f"-m add-entropy-control --task {JOB}"):
        choose(found, "add-entropy-control", None)
    with pytest.raises(UsageError, match=f"did you mean {METHOD}"):
        choose(found, METHOD[:-1], None)
    with pytest.raises(UsageError, match="as a method of its own"):
        choose(found, f"{METHOD}+clip-advantages", None)
    with pytest.raises(UsageError, match=f"results of it there: {METHOD}$"):
        choose(found, METHOD, f"{METHOD}:bound=9")


def test_a_result_under_another_trainer_is_nobodys_merit(tmp_path):
    task = task_with(tmp_path)
    ledger.append(task, "result", run="a" * 12, result=result().as_json(), under="main")
    with pytest.raises(UsageError, match="found no result of it"):
        choose(facts(task), METHOD, None)


QUIET = SideEffect(reason="its baseline is 3 x the median", verdict=Verdict.FAIL)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verdict": Verdict.FAIL}, "its verdict is fail: "),
        ({"verdict": Verdict.NO_OP}, "its verdict is no_op: "),
        ({"verdict": Verdict.NOT_APPLICABLE}, "its verdict is not_applicable: "),
        ({"verdict": Verdict.NOT_REPRODUCED}, "its verdict is not_reproduced: "),
        ({"verdict": Verdict.DEGENERATE, "flags": (Flag.DEGENERATE,)}, "its verdict is degenerate"),
        (
            {"verdict": Verdict.INCONCLUSIVE, "flags": (Flag.INCONCLUSIVE,)},
            "its verdict is inconclusive: ",
        ),
        ({"flags": (Flag.OLD_SENSITIVE,)}, "it is old_sensitive: "),
        ({"flags": (Flag.BEYOND_BUDGET,)}, "it is beyond_budget: "),
        (
            {"fidelity": "reduced", "dp_ranks": (1,), "dp_recorded": 4},
            "it was replayed on 1 of 4 data-parallel ranks: not full-fidelity",
        ),
        ({"side_effect": QUIET}, "the quiet control is itself a spike"),
        ({"against": "clip-advantages"}, "it was compared with clip-advantages"),
        ({"evidence": "mechanism"}, "the median of its case was not measured"),
        ({"backend": "axrl"}, "it was replayed by axrl"),
        ({"verdict": Verdict.FAIL, "diagnostic": True}, "its verdict is fail: "),
    ],
)
def test_what_is_never_recorded(changes, why):
    told = refusals(result(**changes))
    assert len(told) == 1 and why in told[0]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.PROVEN),
        ({"verdict": Verdict.PARTIAL}, Status.PARTIAL),
        ({"flags": (Flag.UNIT_UNCHECKED,)}, Status.PARTIAL),
        ({"diagnostic": True}, Status.DIAGNOSTIC),
        ({"side_effect": None}, Status.PROVEN),
    ],
)
def test_what_is_recorded_has_its_status_by_the_rule(changes, status):
    one = result(**changes)
    assert refusals(one) == [] and one.status is status
