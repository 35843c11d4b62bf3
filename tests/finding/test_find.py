"""``find``: one place or a list of candidates, and one row a snapshot."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from cli_ran import Ran
from output_trees import HOUR_AGO, make_output, make_snapshot, warning

from replay_lib.errors import UsageError
from replay_lib.finding import find, locate
from replay_lib.finding.places import Place
from replay_lib.preserving import preserve
from replay_lib.record import ledger
from replay_lib.record.task import Task


def root_of(output: Path) -> Path:
    return output / "checkpoints" / "spike_snapshots"


def test_a_job_becomes_its_output_directory(tmp_path: Path) -> None:
    output = make_output(tmp_path, "20261101~job-a__actor", [85])
    make_output(tmp_path, "20261101~job-ab__actor", [85])
    expected = Place(
        target="job-a", output=output, job="job-a", role="actor", roots=(root_of(output),)
    )
    assert locate("job-a", [tmp_path]) == expected


def test_outputs_are_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = make_output(tmp_path / "two", "x~job-a__actor", [85])
    listed = os.pathsep.join([str(tmp_path / "absent"), str(tmp_path / "two")])
    monkeypatch.setenv("SPIKE_REPLAY_OUTPUTS", listed)
    place = locate("job-a")
    assert place.output == output
    assert place.notes == (f"{tmp_path / 'absent'}: not looked at (No such file or directory)",)


def test_several_roles_are_listed_and_none_is_chosen(tmp_path: Path) -> None:
    actor = make_output(tmp_path, "x~job-a__actor", [85, 90])
    critic = make_output(tmp_path, "x~job-a__critic")
    for output, seconds in ((actor, HOUR_AGO), (critic, HOUR_AGO - 60)):
        for path in (output, output / "checkpoints", root_of(output)):
            os.utime(path, (seconds, seconds))
    with pytest.raises(UsageError) as caught:
        find("job-a", [tmp_path])
    assert str(caught.value).splitlines() == [
        "job 'job-a': found 2 output directories; choose one with --role:",
        f"  --role actor  {actor}  (2 snapshots, 0 preserved)",
        f"  --role critic  {critic}  (0 snapshots, 0 preserved)",
    ]
    assert find("job-a", [tmp_path], "critic").place.output == critic


def test_two_of_one_role_are_chosen_by_path(tmp_path: Path) -> None:
    outputs = [make_output(tmp_path, f"{n}~job-a__actor", [85]) for n in (1, 2)]
    with pytest.raises(UsageError, match="choose one by its path"):
        find("job-a", [tmp_path], "actor")
    assert find(str(outputs[1])).place.output == outputs[1]


def test_what_is_not_there_gets_the_nearest_name(tmp_path: Path) -> None:
    make_output(tmp_path, "x~job-math__actor", [85])
    with pytest.raises(UsageError) as caught:
        find("job-mat", [tmp_path])
    told = f"job 'job-mat': found no directory *~job-mat__<role> in {tmp_path}. did you mean"
    assert str(caught.value).startswith(f"{told} job-math?")
    with pytest.raises(UsageError, match="found no role 'critic', expected a role of one of"):
        find("job-math", [tmp_path], "critic")
    with pytest.raises(UsageError, match="expected --outputs ROOT or ROOTs in SPIKE_REPLAY_OUT"):
        find("job-math")


def test_a_name_that_is_a_directory_too_is_nobodys_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_output(tmp_path / "outputs", "x~job-a__actor", [85])
    make_output(tmp_path, "job-a", [90])
    with pytest.raises(UsageError, match=r"write \./job-a for the directory"):
        find("job-a", [tmp_path / "outputs"])
    assert [row.step for row in find("./job-a").rows] == [90]


def test_paths_of_every_kind(tmp_path: Path) -> None:
    output = make_output(tmp_path, "x~job-a__actor", [85, 90])
    for path in (output, root_of(output), root_of(output).with_name("spike_snapshots-active")):
        path.mkdir(exist_ok=True)
        found = find(str(path))
        assert [row.step for row in found.rows] == [85, 90]
        assert (found.place.job, found.place.role) == ("job-a", "actor")
    assert [row.step for row in find(f"{root_of(output)}/iter_0000090").rows] == [90]
    with pytest.raises(UsageError, match="found a directory of outputs, expected one of them"):
        find(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="found no spike_snapshots down to level 3"):
        find(str(tmp_path / "empty"))


def test_a_root_below_a_recipes_own_directory(tmp_path: Path) -> None:
    output = tmp_path / "x~job-a__actor"
    make_snapshot(output / "ppo_gsm8k" / "checkpoints" / "spike_snapshots", 85)
    assert [row.step for row in find("job-a", [tmp_path]).rows] == [85]


def test_rows_say_what_a_snapshot_is(tmp_path: Path) -> None:
    make_output(tmp_path, "x~job-a__actor", [85])
    (row,) = find("job-a", [tmp_path]).rows
    assert (row.grad_norm_preclip, row.grad_norm_median, row.ratio) == (8.0, 2.0, 4.0)
    assert row.layout == {"world_size": 2, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 2}
    assert row.path is not None
    assert row.files == len(list(row.path.iterdir()))
    assert row.bytes == sum(p.stat().st_size for p in row.path.iterdir())
    assert row.age == pytest.approx(time.time() - HOUR_AGO, abs=60)  # what finding it took
    assert (row.complete, row.preserved, row.goes_next) == (True, None, False)
    assert row.routing_files == 2
    assert row.payloads is not None and row.payloads > 0


def test_broken_ones_get_a_row_that_says_why(tmp_path: Path) -> None:
    output = make_output(tmp_path, "x~job-a__actor", [80, 85, 90, 95, 100])
    root = root_of(output)
    (root / "iter_0000080" / "axrl_metadata.json").write_text("[]")
    (root / "iter_0000085" / "batch_rank1.pt").unlink()
    (root / "iter_0000090" / "batch_rank0.pt").write_bytes(b"PK")
    shutil.rmtree(root / "iter_0000095")
    (root / "iter_0000095").mkdir()
    rows = {row.step: row for row in find("job-a", [tmp_path]).rows}
    assert [row.complete for row in rows.values()] == [False, False, False, False, True]
    assert "found a JSON list" in rows[80].why
    assert "batch_rank1.pt: found no such file, expected the batch of rank 1" in rows[85].why
    assert "without the table that ends a whole file" in rows[90].why
    assert rows[95].files == 0
    assert rows[85].files == rows[90].files - 1 > 10


def test_the_rotation_takes_the_lowest_steps(tmp_path: Path) -> None:
    make_output(tmp_path, "x~job-a__actor", [100, 85, 90], max_snapshots=3)
    make_output(tmp_path, "x~job-b__actor", [85, 90, 95, 100], max_snapshots=2)
    make_output(tmp_path, "x~job-c__actor", [85, 90], max_snapshots=3)
    make_output(tmp_path, "x~job-d__actor", [85, 90], max_snapshots=0)

    def doomed(job: str) -> list[int]:
        return [row.step for row in find(job, [tmp_path]).rows if row.goes_next]

    assert [doomed(f"job-{x}") for x in "abcd"] == [[85], [85, 90, 95], [], []]
    only = find(str(root_of(tmp_path / "x~job-b__actor") / "iter_0000090")).rows
    assert [row.goes_next for row in only] == [True]


def test_preserved_ones_are_told_even_when_they_are_all_that_is_left(tmp_path: Path) -> None:
    output = make_output(tmp_path, "x~job-a__actor", [85, 90])
    kept = preserve(root_of(output) / "iter_0000085").path
    preserve(root_of(output) / "iter_0000090")
    shutil.rmtree(root_of(output) / "iter_0000085")
    os.utime(root_of(output) / "iter_0000090" / "axrl_metadata.json", (HOUR_AGO + 9,) * 2)
    gone, there = find("job-a", [tmp_path]).rows
    assert (gone.path, gone.preserved, gone.preserved_why, gone.goes_next) == (
        None,
        kept,
        "",
        False,
    )
    assert (gone.grad_norm_preclip, gone.complete) == (8.0, True)
    assert there.preserved_why == "the trainer wrote this step again after it was preserved"
    (kept / "__0_0.distcp").unlink()
    gone, _ = find("job-a", [tmp_path]).rows
    assert gone.preserved_why == "1 files changed since: __0_0.distcp"
    assert not gone.complete


def test_spikes_of_a_log_and_what_became_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = make_output(tmp_path / "outputs", "x~job-a__actor", [60, 85, 90])
    preserve(root_of(output) / "iter_0000060")
    shutil.rmtree(root_of(output) / "iter_0000060")
    lines = [(40, "7.5000"), (60, "8.0000"), (85, "8.0000"), (88, "9.0000"), (90, "7.0000")]
    log = output / "run-train.log"
    log.write_text("".join(warning(step, norm) for step, norm in lines))
    found = find("job-a", [tmp_path / "outputs"], every_log=True)
    fates = {one.step: one.fate for one in found.told}
    assert fates == {
        40: "rotated away",
        60: "preserved",
        85: "on disk",
        88: "absent",
        90: "another",
    }
    assert found.output is not None
    assert found.output.parent == Path("tmp/spike-replay/job-a")
    assert (found.output / "run-train.log").read_bytes() == log.read_bytes()


def test_the_command_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = make_output(tmp_path / "outputs", "x~job-a__actor", [85])
    ran = Ran(capsys, "find", "job-a", "--outputs", "outputs", "--json")
    assert ran.code == 0
    assert ran.document["output_directory"] == str(output)
    (event,) = ledger.read(Task("job-a"))
    assert (event.kind, event.data["target"]) == ("found", "job-a")
    assert event.data["output_directories"] == [str(output)]
    assert event.data["snapshots"] == ran.document["snapshots"]
    plain = Ran(capsys, "find", str(output / "checkpoints"))
    assert plain.code == 0
    assert "complete" in plain.out
    assert len(ledger.read(Task("job-a"))) == 1  # a path is no task
    refused = Ran(capsys, "find", "job-b", "--outputs", "outputs", "--json")
    assert (refused.code, refused.document["error"]["code"]) == (2, "usage")


def test_a_norm_that_is_no_number_is_strict_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = make_output(tmp_path, "x~job-a__actor")
    make_snapshot(root_of(output), 85)
    file = root_of(output) / "iter_0000085" / "axrl_metadata.json"
    value = json.loads(file.read_text()) | {"grad_norm": float("nan")}
    file.write_text(json.dumps(value))
    ran = Ran(capsys, "find", str(output), "--json")
    assert ran.document["snapshots"][0]["grad_norm_preclip"] == "NaN"


def test_what_may_not_be_read_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = make_output(tmp_path, "x~job-a__actor", [85])
    closed: list[Path] = []
    scan = os.scandir

    def scandir(path: Path | str) -> Any:
        if Path(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.chdir(tmp_path)
    closed[:] = [root_of(output)]
    for command in ("find", "preserve"):
        ran = Ran(capsys, command, output)
        assert ran.code == 2 and "Permission denied" in ran.err
    closed[:] = [root_of(output) / "iter_0000085"]
    ran = Ran(capsys, "preserve", output)
    assert ran.code == 3 and "Permission denied" in ran.err
    assert "Permission denied" in find(str(output)).rows[0].why


def test_a_job_that_no_task_can_be_named_after_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_output(tmp_path / "outputs", "x~job (a)__actor", [85])
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--json",)):
        ran = Ran(capsys, "find", "job (a)", "--outputs", "outputs", *more)
        assert ran.code == 0 and "85" in ran.out
        assert "not kept in a ledger: task 'job (a)'" in ran.err
    assert [row["step"] for row in ran.document["snapshots"]] == [85]
    assert not (tmp_path / "agent-task").exists()


def test_what_was_seen_is_told_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_output(tmp_path / "outputs", "x~job-a__actor", [85])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent-task").write_text("no directory")
    ran = Ran(capsys, "find", "job-a", "--outputs", "outputs")
    assert ran.code == 2 and "a ledger that can be written" in ran.err
    assert "x~job-a__actor" in ran.out
