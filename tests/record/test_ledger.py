"""A ledger keeps every event, whatever happens to those who write it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest

from replay_lib.errors import UsageError
from replay_lib.record import ledger
from replay_lib.record.history import history_of
from replay_lib.record.task import Task


def test_events_come_back_in_order(tmp_path: Path) -> None:
    task = Task("axrl-v002-052915-math-moe-r3", tmp_path)
    assert ledger.read(task) == ()
    run = ledger.new_run()
    ledger.append(task, "started", run=run, command="replay", planned=["baseline"])
    ledger.append(task, "ended", run=run, exit_code=0, seconds=1.5)
    started, ended = ledger.read(task)
    assert (started.kind, started.run, started.data["planned"]) == ("started", run, ["baseline"])
    assert (ended.kind, ended.run, ended.data["exit_code"]) == ("ended", run, 0)
    assert started.at <= ended.at
    assert ledger.tasks(tmp_path) == [task]


def test_an_unfinished_line_is_no_event_and_is_cut_off(tmp_path: Path) -> None:
    task = Task("job", tmp_path)
    ledger.append(task, "observation", text="first")
    whole = task.ledger.read_bytes()
    task.ledger.write_bytes(whole + whole[: len(whole) // 2])
    assert [e.data["text"] for e in ledger.read(task)] == ["first"]
    ledger.append(task, "observation", text="second")
    assert [e.data["text"] for e in ledger.read(task)] == ["first", "second"]


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    task = Task("job", tmp_path)
    ledger.append(task, "observation", text="first")
    task.ledger.write_bytes(task.ledger.read_bytes() + b"{}\n")
    with pytest.raises(
        UsageError, match=r"job\.jsonl: line 2: at: found {}, expected one event of a ledger \("
    ):
        ledger.read(task)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: found what is no JSON (Expecting property name"),
        ("[" * 100_000, "line 2: found what is no JSON (maximum recursion depth"),
        (
            '{"schema": 2}',
            "line 2: schema: found 2, expected one event of a ledger (Input should be 1). A newer",
        ),
    ],
    ids=["no JSON", "too deep", "newer"],
)
def test_what_is_wrong_with_a_line_is_told(tmp_path: Path, line: str, told: str) -> None:
    task = Task("job", tmp_path)
    ledger.append(task, "observation", text="first")
    task.ledger.write_text(f"{task.ledger.read_text()}{line}\n")
    with pytest.raises(UsageError) as caught:
        ledger.read(task)
    assert told in str(caught.value)


def test_a_blank_line_is_nothing(tmp_path: Path) -> None:
    task = Task("job", tmp_path)
    ledger.append(task, "observation", text="first")
    task.ledger.write_text(f"\n{task.ledger.read_text()}\n\n")
    ledger.append(task, "observation", text="second")
    assert [e.data["text"] for e in ledger.read(task)] == ["first", "second"]


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_clock_that_is_behind_reorders_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    task = Task("job", tmp_path)
    ahead = datetime.now(UTC) + timedelta(hours=7)
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "datetime", mock.Mock(now=lambda _: ahead))
        ledger.append(task, "started", command="x" * size)
        ledger.append(task, "ended", exit_code=0)
        ledger.append(task, "observation", text="x" * size)
    ended = ledger.append(task, "finished", text="done")
    assert ended.at == ahead and ledger.read(task)[-1] == ended
    assert history_of(ledger.read(task)).finished is not None


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(ledger.FileLock, "acquire", none)
    with pytest.raises(UsageError, match="found a file system without locks, expected one with"):
        ledger.append(Task("job", tmp_path), "observation", text="one")


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    task = Task("job", tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ledger.append(task, "observation", text=str(n)), range(64)))
    assert sorted(int(e.data["text"]) for e in ledger.read(task)) == list(range(64))


def test_a_task_is_named_as_a_file_could_be(tmp_path: Path) -> None:
    for name in ("", "..", "a/b", ".hidden", "a b", "x" * 201, "job\n"):
        with pytest.raises(UsageError, match="expected a job's name"):
            Task(name, tmp_path)


def test_every_run_has_a_directory_of_its_own(tmp_path: Path) -> None:
    at = datetime(2026, 5, 29, 15, 2, 3, tzinfo=UTC)
    first, second = Task("job", tmp_path).output(at), Task("job", tmp_path).output(at)
    assert first == tmp_path / "tmp/spike-replay/job/20260529-150203"
    assert second == tmp_path / "tmp/spike-replay/job/20260529-150203-1"
