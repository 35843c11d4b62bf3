"""The pytest plugin keeps its replays in the tasks of its cases; see plugin_suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_suite import ALL_AS_EXPECTED, SNAPSHOT, Suite, make_suite

from replay_lib.record import ledger
from replay_lib.record.results_file import read_results
from replay_lib.record.task import Task
from replay_lib.run import RECORDED_METHODS


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return make_suite(pytester, monkeypatch)


def preserve(suite: Suite, name: str, job: str) -> None:
    """Let the snapshot of a case be a link to one in the output directory of ``job``."""
    linked = suite.pytester.path / "spike_cases" / name / f"iter_{name}"
    root = suite.pytester.path / name / f"0612~{job}__actor" / "checkpoints" / "spike_snapshots"
    root.mkdir(parents=True)
    linked.rename(root / "iter_0000085")
    linked.symlink_to(root / "iter_0000085")


def test_each_case_is_kept_in_its_own_task(suite: Suite) -> None:
    for name in ("first", "second", "third"):
        suite.case(name)
    preserve(suite, "first", "job-1")
    preserve(suite, "second", "job-1")
    suite.run("-n", "2").assert_outcomes(passed=3 * 6)
    assert [task.job for task in ledger.tasks(suite.pytester.path)] == ["job-1"]
    task = Task("job-1", suite.pytester.path)
    events = ledger.read(task)
    assert len({event.run for event in events}) == 2
    wanted = ["baseline", *RECORDED_METHODS]
    for started in [event for event in events if event.kind == "started"]:
        mine = [event for event in events if event.run == started.run]
        results = [event.data["result"] for event in mine if event.kind == "result"]
        assert sorted(r["experiment"] for r in results) == sorted(wanted)
        assert len({r["case"] for r in results}) == 1
        assert sorted(started.data["planned"]) == sorted(wanted)
        assert started.data["command"].startswith("pytest ") and "-n 2" in started.data["command"]
        assert mine[-1].kind == "ended" and mine[-1].data["exit_code"] == 0
        output = suite.pytester.path / started.data["output"]
        assert len(read_results(output / "results.jsonl")) == len(wanted)
    assert "disable-routing-replay" in task.file.read_text()


def test_a_named_task_takes_all_and_keeps_failures(suite: Suite) -> None:
    suite.case("first", ALL_AS_EXPECTED.replace("fail", "pass"))
    suite.run("--spike-task", "mine", "-k", "disable or reproduction").assert_outcomes(
        passed=1, failed=1
    )
    events = ledger.read(Task("mine", suite.pytester.path))
    assert [e.kind for e in events] == ["started", "result", "result", "ended"]
    assert events[-1].data["exit_code"] == 1


def test_a_refused_method_and_a_worker_that_does_not_start_are_failures(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.case("first")
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(suite.pytester.path / "refuse.log"))
    suite.run("--spike-task", "mine", "-k", "loss-tokens or balance").assert_outcomes(
        passed=1, failed=1
    )
    task = Task("mine", suite.pytester.path)
    (failure,) = [e.data for e in ledger.read(task) if e.kind == "failure"]
    assert failure["experiment"] == "first / replay-r3-on-loss-tokens-only"
    assert failure["code"] == "batch"
    suite.engine(
        "from replay_lib import run\nfrom replay_lib.errors import EngineError\n"
        "def dead(*_):\n    raise EngineError('the worker died')\nrun.open_engine = dead"
    )
    suite.run("--spike-task", "mine", "-k", "mitigation").assert_outcomes(failed=5)
    failures = [e.data for e in ledger.read(task) if e.kind == "failure"][1:]
    assert [(f["experiment"], f["code"]) for f in failures] == [("first / baseline", "engine")]
    assert "the worker died" in task.file.read_text()


def test_what_could_be_no_task_is_told_at_once(suite: Suite) -> None:
    suite.case("first")
    ran = suite.run("--spike-task", "a/b")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines(["*expected a job's name*"])


def test_without_a_task_nothing_is_written(suite: Suite) -> None:
    suite.case("first", snapshot=SNAPSHOT)
    suite.run("-k", "reproduction").assert_outcomes(passed=1)
    assert not (Path(suite.pytester.path) / "agent-task").exists()
