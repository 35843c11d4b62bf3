"""What is read out of a ledger."""

from __future__ import annotations

import pytest

from replay_lib.engine.protocol import MitigationCall, Retained
from replay_lib.record import ledger
from replay_lib.record.task import Task
from replay_lib.report import view
from replay_lib.report.facts import tally
from replay_lib.report.history import history_of
from replay_lib.rule import Verdict
from tests.report.make_signals import make_signals
from tests.report.make_task import (
    COPY,
    JOB,
    OUTPUT,
    SNAPSHOT,
    facts,
    full_task,
    keep_run,
    results_of,
)


def test_a_whole_task(tmp_path):
    found = facts(full_task(tmp_path))
    assert found.outputs == (OUTPUT,)
    assert (found.snapshot, found.preserved, found.usable) == (COPY, (COPY,), COPY)
    assert found.snapshots[0] == SNAPSHOT
    assert len(found.attempts) == 13 and len(found.results) == 12
    assert [r.case for r in found.baselines] == ["zoo-natural", "axrl-plain-step85"]
    assert {r.case for r in found.last_results()} == {"axrl-plain-step85"}
    assert found.attempts[0].command == f"spike-replay sweep {COPY}"
    assert [m.method for m in found.methods] == ["clip-rollout-log-ratio"]
    assert found.signals is not None and found.finished is None


def test_failures_and_what_a_killed_command_left_undone(tmp_path):
    told = [(f.what, f.code) for f in facts(full_task(tmp_path)).failures]
    assert told == [
        ("axrl-plain-step85 / needs-teacher", "batch"),
        ("user:lost-one", "killed or still running"),
    ]


def test_a_refused_experiment_of_a_killed_command_is_told_once(tmp_path):
    task = Task(JOB, tmp_path)
    planned = ["baseline", "one", "two"]
    baseline = results_of("zoo-natural")[:1]
    keep_run(task, "a" * 12, baseline, planned=planned, end=False)
    refused = {"experiment": "zoo-natural / one", "code": "batch", "message": "no column"}
    ledger.append(task, "failure", run="a" * 12, **refused)
    assert [f.what for f in facts(task).failures] == ["zoo-natural / one", "two"]


def test_what_this_version_cannot_read_is_a_failure_and_not_the_end(tmp_path):
    task = Task(JOB, tmp_path)
    document = results_of("zoo-natural")[0].as_json()
    ledger.append(task, "result", result=document | {"verdict": "splendid"})
    ledger.append(task, "result", result=document | {"of_a_later_version": 1})
    ledger.append(task, "result", result=None)
    ledger.append(task, "result", result=document)
    ledger.append(task, "analyzed", snapshot=COPY, signals={"schema": 99})
    read = facts(task)
    assert [a.result.experiment for a in read.attempts] == ["baseline"]
    assert [f.code for f in read.failures] == ["unreadable"] * 3
    assert read.signals is None and "validation error" in (read.signals_fault or "")


def test_results_under_another_trainer_are_told_and_count_for_nothing(tmp_path):
    task = Task(JOB, tmp_path)
    baseline, *others = results_of("zoo-natural")
    keep_run(task, "a" * 12, [baseline])
    ledger.append(task, "result", run="a" * 12, result=others[0].as_json(), under="main")
    read = facts(task)
    assert [a.name for a in read.attempts] == ["baseline", f"{others[0].experiment} (under main)"]
    assert read.results == read.last_results() == [baseline]


def test_of_a_command_on_several_cases_each_result_has_the_snapshot_of_its_own(tmp_path):
    task = Task(JOB, tmp_path)
    snapshots = [f"/cases/{case}/snapshot/iter_0000061" for case in ("zoo-natural", "other")]
    results = [results_of("zoo-natural")[0], results_of("axrl-plain-step85")[0]]
    keep_run(task, "a" * 12, results, snapshots=snapshots)
    assert [a.snapshot for a in facts(task).attempts] == [snapshots[0], ""]


def test_an_event_about_the_report_changes_nothing(tmp_path):
    task = full_task(tmp_path)
    before = facts(task)
    ledger.append(task, "reported", page="p", report="r", sha256="s")
    assert facts(task) == before


def test_the_released_copy_is_not_named_on_command_lines(tmp_path):
    task = full_task(tmp_path)
    ledger.append(task, "released", preserved=COPY)
    assert (facts(task).usable, facts(task).released) == (COPY, (COPY,))
    ledger.append(task, "analyzed", snapshot=SNAPSHOT, signals=None)
    assert facts(task).usable == SNAPSHOT
    ledger.append(task, "preserved", snapshot=SNAPSHOT, preserved=COPY)
    assert (facts(task).usable, facts(task).released) == (COPY, ())


def test_a_snapshot_preserved_after_a_replay_is_not_the_selected_one(tmp_path):
    task = full_task(tmp_path)
    ledger.append(task, "preserved", snapshot=f"{SNAPSHOT}0", preserved=f"{COPY}0")
    assert facts(task).snapshot == facts(task).usable == COPY
    assert f"{SNAPSHOT}0" in facts(task).snapshots


def test_the_history_knows_every_step_once_and_the_replay_has_the_last_word(tmp_path):
    points = history_of(facts(full_task(tmp_path)))
    assert [p.step for p in points] == [41, 61, 63, 70, 85]
    last = points[-1]
    assert last.norm == pytest.approx(8.441921404) and last.median == pytest.approx(
        2.1059, rel=1e-3
    )
    assert (last.detector, last.target) == (2.0, 1.5)
    assert points[0].ratio == pytest.approx(1.9 / 2.05)


@pytest.mark.parametrize("norm", [None, "8", "Infinity", 0.0, True, -1.0])
def test_a_norm_that_is_none_is_not_drawn(tmp_path, norm):
    task = Task(JOB, tmp_path)
    seen = [{"step": 5, "grad_norm_preclip": norm}, {"step": "6", "grad_norm_preclip": 1.0}]
    good = {"step": 7, "grad_norm_preclip": 2}
    snapshots = [*seen, good]
    ledger.append(task, "found", target=JOB, output_directories=[], snapshots=snapshots)
    assert [p.step for p in history_of(facts(task))] == [7]


def test_headlines(tmp_path):
    task = Task(JOB, tmp_path)
    ledger.append(task, "observation", text="begun")
    assert view.headline(facts(task)) == "Nothing was replayed yet."
    keep_run(task, "a" * 12, results_of("zoo-natural"))
    assert view.headline(facts(task)) == (
        "The recorded spike came out again, 3.73 times the median. Best of 4 attempts: "
        "clip-rollout-log-ratio, proven, ratio 0.998, 95% of the signal kept."
    )
    keep_run(task, "b" * 12, results_of("axrl-plain-step85"))
    assert view.headline(facts(task)).endswith(
        "6 attempts, on a median that was not measured: none says what a method is worth."
    )


def test_the_smallest_intervention_that_is_proven_is_the_best(tmp_path):
    real = results_of("zoo-natural")
    (proven,) = [r for r in real if r.verdict is Verdict.PASS]
    less = Retained(tokens=1.0, advantage=0.6, dloss_dlogprob=0.6)
    lower = {"grad_norm_preclip": proven.grad_norm_preclip / 2}
    pair = (MitigationCall(slug="cap"), *proven.mitigations)
    others = [
        proven.model_copy(update={"experiment": "lower", "retained": less} | lower),
        proven.model_copy(update={"experiment": "pair", "mitigations": pair} | lower),
    ]
    task = Task(JOB, tmp_path)
    keep_run(task, "a" * 12, [*real, *others])
    assert "Best of 6 attempts: clip-rollout-log-ratio, proven" in view.headline(facts(task))
    unseen = [proven.model_copy(update={"experiment": "bare", "side_effect": None})]
    keep_run(task, "b" * 12, [r.model_copy(update={"case": "x"}) for r in real[:1] + unseen])
    told = view.headline(facts(task))
    assert told.endswith(
        "bare, proven, ratio 0.998, 95% of the signal kept; its side effects are not measured."
    )


def test_only_negative_results_do_not_shine(tmp_path):
    task = Task(JOB, tmp_path)
    bad = [r for r in results_of("zoo-natural") if r.verdict not in (Verdict.PASS, Verdict.PARTIAL)]
    keep_run(task, "a" * 12, bad)
    assert view.headline(facts(task)).endswith("None of 2 attempts helped.")


def test_verdicts_are_counted_and_put_in_their_order(tmp_path):
    found = facts(full_task(tmp_path))
    assert tally(found.last_results()) == [
        (Verdict.NOT_APPLICABLE, 1),
        (Verdict.FAIL, 2),
        (Verdict.DEGENERATE, 2),
        (Verdict.NO_OP, 1),
    ]
    cases, rows = view.matrix(found)
    assert cases == ["zoo-natural", "axrl-plain-step85"]
    assert rows[0] == ("baseline", [Verdict.REPRODUCED] * 2)
    assert dict(rows)["mask-improbable-rows"] == [None, Verdict.DEGENERATE]


@pytest.mark.parametrize(
    ("fidelity", "said"),
    [("full", "recorded layout"), ("folded", "summed in turn"), ("reduced", "not full-fidelity")],
)
def test_fidelity_in_words(fidelity, said):
    one = results_of("axrl-plain-step85")[0].model_copy(update={"fidelity": fidelity})
    assert said in view.fidelity(one) and "2 of 2" in view.fidelity(one)


def test_signals_are_those_of_the_selected_snapshot_alone(tmp_path):
    task = Task(JOB, tmp_path)
    other = COPY.replace("0000085", "0000091")
    signals = make_signals().model_dump(mode="json", by_alias=True)
    for place in (COPY, other):
        source = place.replace("spike_snapshots-active", "spike_snapshots")
        ledger.append(task, "preserved", snapshot=source, preserved=place)
    ledger.append(task, "analyzed", snapshot=other, signals=signals)
    keep_run(task, "a" * 12, results_of("axrl-plain-step85"))
    read = facts(task)
    assert (read.snapshot, read.usable, read.signals) == (COPY, COPY, None)
    assert read.signals_of(other) is not None
    ledger.append(task, "analyzed", snapshot=SNAPSHOT, signals=signals)
    again = facts(task)  # the source is the snapshot that the copy is of
    assert again.usable == COPY and again.signals is not None
