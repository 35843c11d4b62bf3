"""Which task a command belongs to, and what its ledger has of it afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from make_results import BASELINE, result

from replay_lib.cli.entry import Terminated
from replay_lib.errors import BatchError, SnapshotError, UsageError
from replay_lib.record import ledger
from replay_lib.record.keeping import keep_command, task_of
from replay_lib.record.refusal import Refusal
from replay_lib.record.results_file import read_results
from replay_lib.record.task import Task

JOB = "axrl-v002-052915-math-moe-r3"
MANIFEST = "preserved.json"
FIRST = result(BASELINE)


def snapshot_in(root: Path, job: str = JOB, kept: str = "spike_snapshots-active") -> Path:
    """An empty snapshot in a job's output directory."""
    snapshot = root / f"0612~{job}__actor" / "checkpoints" / kept / "iter_0000085"
    snapshot.mkdir(parents=True)
    return snapshot


def case_of(directory: Path, snapshot: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "case.yaml").write_text(f"schema: 1\nsnapshot: {snapshot}\n")
    return directory


def test_what_the_user_names_comes_first(tmp_path: Path) -> None:
    snapshot = snapshot_in(tmp_path)
    (snapshot / MANIFEST).write_text(json.dumps({"task": "other"}))
    assert task_of(snapshot, "mine", tmp_path) == Task("mine", tmp_path)
    with pytest.raises(UsageError, match="expected a job's name"):
        task_of(snapshot, "not/mine")


def test_then_the_manifest_then_the_output_directory(tmp_path: Path) -> None:
    snapshot = snapshot_in(tmp_path)
    assert task_of(snapshot, None) == Task(JOB)
    (snapshot / MANIFEST).write_text(json.dumps({"task": None}))
    assert task_of(snapshot, None) == Task(JOB)
    (snapshot / MANIFEST).write_text(json.dumps({"task": "other"}))
    assert task_of(snapshot, None, tmp_path) == Task("other", tmp_path)


def test_a_snapshot_in_the_rotation_belongs_to_its_job_too(tmp_path: Path) -> None:
    assert task_of(snapshot_in(tmp_path, kept="spike_snapshots"), None) == Task(JOB)
    assert task_of(snapshot_in(tmp_path, "a__b", kept="spike_snapshots"), None) == Task("a__b")


@pytest.mark.parametrize(
    "place", ["iter_0000085", f"0612~{JOB}__actor/spike_snapshots/iter_0000085"]
)
def test_other_places_name_no_task(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    assert task_of(tmp_path / place, None) is None
    assert task_of(tmp_path / "absent", None) is None


def test_a_case_is_its_snapshot(tmp_path: Path) -> None:
    snapshot = snapshot_in(tmp_path / "outputs")
    case = case_of(tmp_path / "cases" / "spike", "snapshot/iter_0000085")
    assert task_of(case, None) is None  # the snapshot is absent: nothing is known of it
    (case / "snapshot").symlink_to(snapshot.parent)
    assert task_of(case, None) == Task(JOB)
    assert task_of(case / "case.yaml", None) == Task(JOB)
    (snapshot / MANIFEST).write_text(json.dumps({"task": "preserved"}))
    assert task_of(case, None) == Task("preserved")


def test_a_link_to_a_snapshot_is_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(snapshot_in(tmp_path))
    assert task_of(tmp_path / "mine", None) == Task(JOB)


@pytest.mark.parametrize("content", ["{", '{"task": 5}', '{"task": "a/b"}', "[" * 100_000])
def test_a_broken_manifest_is_named(tmp_path: Path, content: str) -> None:
    snapshot = snapshot_in(tmp_path)
    (snapshot / MANIFEST).write_text(content)
    with pytest.raises(SnapshotError, match=r"preserved\.json.*Name the task with --task JOB"):
        task_of(snapshot, None)
    assert task_of(snapshot, "mine") == Task("mine")


def kinds(task: Task) -> list[str]:
    return [event.kind for event in ledger.read(task)]


def test_a_command_is_kept_from_start_to_end(tmp_path: Path) -> None:
    task, snapshot = Task(JOB, tmp_path), tmp_path / "iter_0000085"
    refused = Refusal("case", "method", BatchError("no column"))
    with keep_command(task, "spike-replay replay S", [snapshot], ["baseline", "method"]) as kept:
        assert kinds(task) == ["started"]
        kept.keep(FIRST)
        assert kinds(task) == ["started", "result"]
        kept.keep(refused)
        kept.exit_code = 4
    started, replayed, failure, ended = ledger.read(task)
    assert len({event.run for event in (started, replayed, failure, ended)}) == 1
    assert started.data["planned"] == ["baseline", "method"]
    assert (started.data["snapshot"], kept.output) == (str(snapshot), Path(started.data["output"]))
    assert replayed.data["result"] == FIRST.as_json()
    assert failure.data == {
        "experiment": "case / method",
        "code": "batch",
        "message": "no column",
    }
    assert ended.data["exit_code"] == 4
    assert kept.output is not None
    assert read_results(kept.output / "results.jsonl") == [FIRST]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (BatchError("no column"), "batch", 4),
        (KeyboardInterrupt(), "interrupted", 130),
        (Terminated("ended by SIGTERM"), "terminated", 143),
        (ZeroDivisionError("division by zero"), "internal", 70),
    ],
)
def test_what_ends_a_command_is_kept(
    tmp_path: Path, error: BaseException, code: str, status: int
) -> None:
    task = Task(JOB, tmp_path)
    with pytest.raises(type(error)), keep_command(task, "replay", [], []):
        raise error
    _, failure, ended = ledger.read(task)
    assert (failure.data["experiment"], failure.data["code"]) == (None, code)
    assert failure.data["message"]
    assert ended.data["exit_code"] == status


def test_without_a_task_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with keep_command(None, "replay", [], []) as kept:
        kept.keep(FIRST)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_a_line_is_written_writes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(JOB, tmp_path)

    def interrupt(_: int) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), keep_command(task, "replay", [], []) as kept:
        monkeypatch.setattr(ledger.os, "fsync", interrupt)
        kept.keep(FIRST)
    assert kinds(task) == ["started", "result", "failure", "ended"]


def test_no_room_for_the_output_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "tmp").write_text("a file where a directory should be")
    with (
        pytest.raises(UsageError, match="expected a directory for a command's output"),
        keep_command(Task(JOB, tmp_path), "replay", [], []),
    ):
        raise AssertionError("nothing begins")


def test_a_ledger_that_cannot_be_read_is_told_at_the_end(tmp_path: Path) -> None:
    task = Task(JOB, tmp_path)
    task.ledger.parent.mkdir(parents=True)
    task.ledger.write_text("<<<<<<< HEAD\n")
    with keep_command(task, "replay", [], []) as kept:
        kept.complete([FIRST])
        kept.keep(FIRST)
    assert "line 1" in str(kept.lost) and kept.status == UsageError.exit_code
    kept_kinds = [json.loads(line)["kind"] for line in task.ledger.read_text().splitlines()[1:]]
    assert kept_kinds == ["started", "result", "ended"], "nothing is lost"


def test_what_a_full_disk_refused_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(JOB, tmp_path)
    full = UsageError("No space left on device")

    def refuse(*_: object, **__: object) -> None:
        raise full

    with keep_command(task, "replay", [], []) as kept:
        with monkeypatch.context() as patched:
            patched.setattr(ledger, "append", refuse)
            patched.setattr("replay_lib.record.keeping.append_results", refuse)
            kept.keep(FIRST)
            assert kept.lost is full
        kept.keep(FIRST)
        assert kept.lost is None
    assert kinds(task) == ["started", "result", "result", "ended"]
    assert kept.output is not None
    assert len(read_results(kept.output / "results.jsonl")) == 2
