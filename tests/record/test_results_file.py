"""results.jsonl: strict JSON, whole lines, whatever happens to the writer."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from make_results import BASELINE, outcome, result, some_results

from replay_lib.errors import UsageError
from replay_lib.record import results_file
from replay_lib.record.results_file import (
    append_results,
    check_results_file,
    read_results,
    write_results,
)


def refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "out" / "results.jsonl"
    results = some_results()
    append_results(file, results[:2])
    append_results(file, results[2:])
    assert read_results(file) == results
    write_results(file, results[:1])
    assert read_results(file) == results[:1]


def test_json_is_strict_where_numbers_are_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    bad = result(outcome("poison", float("nan"), nonfinite=("loss",)))
    append_results(file, [bad, result(outcome("more", float("inf")))])
    for line in file.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert [str(r.grad_norm_preclip) for r in read_results(file)] == ["nan", "inf"]


def test_a_writer_that_dies_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"
    append_results(file, [result(BASELINE)])
    before = file.read_bytes()

    def die(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        append_results(file, some_results())
    assert file.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".lock") == ["results.jsonl"]


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    one = result(BASELINE)
    writers = [
        threading.Thread(target=lambda: [append_results(file, [one]) for _ in range(5)])
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_results(file)) == 20


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            '{"case": 1}',
            "found 25 faults, the first at case: Input should be a valid string, "
            "expected one result",
        ),
        ("[]", "found list, expected one result as JSON"),
        (
            "torn",
            "found Expecting value: line 1 column 1 (char 0), expected one result as JSON",
        ),
    ],
)
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "results.jsonl"
    append_results(file, [result(BASELINE)])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UsageError) as caught:
        read_results(file)
    assert str(caught.value) == f"{file}: line 2: {told}"


def test_a_torn_last_line_is_not_written_behind(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"case": ')
    with pytest.raises(UsageError) as caught:
        append_results(file, [result(BASELINE)])
    assert str(caught.value) == (
        f"{file}: last line: found no newline at its end, expected whole lines of JSON"
    )


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found no such file, expected a results"):
        read_results(tmp_path / "results.jsonl")


def put(file: Path) -> None:
    append_results(file, [result(BASELINE)])


@pytest.mark.parametrize("act", [check_results_file, put, lambda f: write_results(f, [])])
def test_what_is_no_file_or_cannot_be_made_one_is_refused(tmp_path: Path, act: Any) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/full")
    long, parent = "x" * 300, tmp_path / "file"
    told = {
        "": "found a directory, expected a file for the results",
        "pipe": "found no regular file, expected a file for the results",
        "link": "found no regular file, expected a file for the results",
        "file/results.jsonl": f"found no directory at {parent}, expected a file for the results",
        long: "found 'File name too long', expected a file that can be written",
    }
    for name, words in told.items():
        with pytest.raises(UsageError) as caught:
            act(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: {words}"


def test_a_disk_that_refuses_is_one_of_our_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError) as caught:
        put(file)
    assert str(caught.value) == (
        f"{file}: found 'No space left on device', expected a file that can be written"
    )


@pytest.mark.parametrize("act", [check_results_file, put])
def test_a_stuck_writer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    monkeypatch.setattr(results_file, "LOCK_SECONDS", 0.1)
    file, lock = tmp_path / "results.jsonl", tmp_path / ".results.jsonl.lock"
    with FileLock(lock), pytest.raises(UsageError) as caught:
        act(file)
    assert str(caught.value) == (
        f"{file}: found its lock {lock} held for 0.1 s, expected no other writer"
    )


def test_a_check_makes_directories_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.jsonl"
    check_results_file(file)
    assert [p.name for p in file.parent.iterdir() if p.suffix != ".lock"] == []
    file.write_text("torn")
    with pytest.raises(UsageError, match="no newline at its end"):
        check_results_file(file)
    check_results_file(file, append=False)  # it is replaced whole
