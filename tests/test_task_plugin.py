"""The pytest plugin keeps its replays in the tasks of its cases; see plugin_suite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_engine
import pytest
from plugin_suite import SNAPSHOT, Suite, make_suite

from replay_lib import run
from replay_lib.case import Case
from replay_lib.errors import UsageError
from replay_lib.expected import Expected
from replay_lib.pytest_task import check_task, keep_case
from replay_lib.record import ledger
from replay_lib.record.results_file import read_results
from replay_lib.record.task import Task
from replay_lib.rule import Verdict
from replay_lib.run import RECORDED_METHODS, ReplayOptions
from replay_lib.suite import Sessions

PARTIAL = Expected.one(Verdict.PARTIAL)


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
    preserve(suite, "second", "job-1")  # the third one belongs nowhere
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


def session_of(task: str) -> Any:
    arguments = SimpleNamespace(args=["tests", "-k", "a b"])
    config = SimpleNamespace(getoption=lambda _: task, invocation_params=arguments)
    return SimpleNamespace(config=config, exitstatus=pytest.ExitCode.OK)


def test_a_named_task_takes_every_case_and_tells_of_red_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    for method, code in (("disable-routing-replay", 1), ("balance-negative-advantages", 0)):
        case = Case.from_snapshot(SNAPSHOT)
        case = case.model_copy(update={"expected": {"balance-negative-advantages": PARTIAL}})
        with keep_case(session_of("mine"), case, [method]) as keep:
            sessions = Sessions(case, ReplayOptions(), [method], keep)
            sessions.replay(method, "baseline", "cpu")
        *_, ended = ledger.read(Task("mine"))
        assert ended.data["exit_code"] == code
    assert len({event.run for event in ledger.read(Task("mine"))}) == 2


def test_an_interrupted_run_is_kept_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = session_of("mine")
    with keep_case(session, Case.from_snapshot(SNAPSHOT), ["a"]):
        session.exitstatus = pytest.ExitCode.INTERRUPTED
    started, failure, ended = ledger.read(Task("mine"))
    assert started.data["command"] == "pytest tests -k 'a b'"
    assert (failure.data["code"], ended.data["exit_code"]) == ("interrupted", 130)


def test_what_could_be_no_task_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a job's name"):
        check_task(session_of("a/b").config)


def test_a_ledger_that_cannot_be_written_fails_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent-task").write_text("a file where a directory should be")
    with (
        pytest.raises(pytest.fail.Exception, match="expected a ledger that can be written"),
        keep_case(session_of("mine"), Case.from_snapshot(SNAPSHOT), []),
    ):
        raise AssertionError("nothing begins")
