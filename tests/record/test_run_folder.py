"""The folder of a run: kept while it goes on, the later line counts, shards merge."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_results import BASELINE, outcome, result

from replay_lib.errors import UsageError
from replay_lib.record.run_folder import (
    TestOutcome,
    add_to_run,
    finish_run,
    merge_runs,
    read_run,
    start_run,
)
from replay_lib.record.shards import Shard

PASSED = TestOutcome(test="t[a]", outcome="passed")
FAILED = TestOutcome(test="t[a]", outcome="failed", message="why")
HALVE = result(outcome("halve", 2.5)).model_copy(update={"case_digest": "1" * 64})


def shard(folder: Path, index: int, *tests: TestOutcome, planned: str = "t[a]") -> Path:
    start_run(folder, Shard(index, 2), [planned])
    add_to_run(folder, tests, [])
    return folder


def test_the_later_line_counts_and_nothing_is_lost(tmp_path: Path) -> None:
    start_run(tmp_path, None, ["t[a]", "t[b]"])
    add_to_run(tmp_path, [FAILED], [HALVE, result(BASELINE)])
    assert read_run(tmp_path).not_run == ["t[b]"]
    again = HALVE.model_copy(update={"seconds": 9.0})
    other = HALVE.model_copy(update={"case_digest": "2" * 64})
    gpu = HALVE.model_copy(update={"device": "cuda (NVIDIA H200)"})
    start_run(tmp_path, None, ["t[a]"])  # run again, a part of it
    add_to_run(tmp_path, [PASSED], [again, other, gpu])
    run = finish_run(tmp_path, [])
    assert [r.experiment for r in run.results] == ["baseline", "halve", "halve", "halve"]
    assert again in run.results and HALVE not in run.results
    assert run.tests == (PASSED,) and run.not_run == ["t[b]"] and not run.green
    assert read_run(tmp_path) == run
    assert (tmp_path / "report.txt").read_text() == run.report()


def test_what_is_green(tmp_path: Path) -> None:
    start_run(tmp_path, None, ["t[a]"])
    assert not read_run(tmp_path).green  # nothing ran
    add_to_run(tmp_path, [FAILED], [])
    assert not finish_run(tmp_path, []).green
    add_to_run(tmp_path, [PASSED], [])
    assert finish_run(tmp_path, []).green
    assert not finish_run(tmp_path, ["an orphan"]).green
    assert finish_run(tmp_path, []).green  # the fault was of the run before


def test_merging_keeps_faults_and_names_what_is_absent(tmp_path: Path) -> None:
    first = shard(tmp_path / "1", 1, PASSED)
    second = shard(tmp_path / "2", 2, planned="t[b]")
    add_to_run(first, [], [HALVE])
    add_to_run(second, [], [HALVE.model_copy(update={"case_digest": "2" * 64})])
    finish_run(first, ["an orphan"])
    run = merge_runs(tmp_path / "out", [first, second])
    assert run.plan.faults == (
        "an orphan",
        f"{HALVE.case}: 2 different sets of files were replayed under this name",
    )
    assert run.not_run == ["t[b]"] and len(run.results) == 2
    add_to_run(second, [TestOutcome(test="t[b]", outcome="skipped", message="no device")], [])
    whole = merge_runs(tmp_path / "out", [first, second])  # into the same folder again
    assert whole.not_run == [] and "skipped: t[b]: no device\n" in whole.report()
    assert "shard 2/2 is absent" in merge_runs(tmp_path / "one", [first]).plan.faults


def test_what_is_refused(tmp_path: Path) -> None:
    first = shard(tmp_path / "1", 1, PASSED)
    with pytest.raises(UsageError, match=r"plan.json: shard: found 1/2, expected None. Take anoth"):
        start_run(first, None, [])
    with pytest.raises(UsageError, match="a folder to be merged, expected another one"):
        merge_runs(first, [first])
    with pytest.raises(UsageError, match="found a shard's folder, expected a new one"):
        merge_runs(first, [shard(tmp_path / "2", 2)])
    with pytest.raises(UsageError, match=r"plan.json: found no such file, expected the plan of a "):
        merge_runs(tmp_path / "out", [tmp_path])
    whole = tmp_path / "whole"
    start_run(whole, None, ["t[a]"])
    with pytest.raises(UsageError, match="expected shards of one count, or none a shard"):
        merge_runs(tmp_path / "out", [first, whole])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file: found no directory, expected a folder for the"):
        merge_runs(tmp_path / "file", [first])
    (first / "tests.jsonl").write_text('{"test": "t"}\n')
    with pytest.raises(UsageError, match=r"tests.jsonl: line 1: found 1 validation error"):
        read_run(first)
    plan = (first / "plan.json").read_bytes()
    (first / "plan.json").write_text("[")
    with pytest.raises(UsageError, match=r"plan.json: found Invalid JSON"):
        read_run(first)
    (first / "plan.json").write_bytes(plan)
    (first / "tests.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(UsageError, match=r"tests.jsonl: found .*invalid start byte, expected line"):
        read_run(first)


def test_what_could_not_be_added_to_is_told_before_the_run(tmp_path: Path) -> None:
    first = shard(tmp_path / "1", 1, PASSED)
    (first / "results.jsonl").write_text('{"case": "a", ')
    with pytest.raises(UsageError, match=r"results.jsonl: last line: found no newline at its end"):
        start_run(first, Shard(1, 2), ["t[a]"])
    (first / "results.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"results.jsonl: line 1: found \d+ faults"):
        start_run(first, Shard(1, 2), ["t[a]"])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"tests.jsonl: found no directory at .*file, expected"):
        start_run(tmp_path / "file", None, ["t[a]"])
