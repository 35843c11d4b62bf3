"""``preserve``: a copy that outlives the rotation, and what is told when it is no longer one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_ran import Ran
from killed_builders import killed_while_building
from output_trees import content, make_output, make_snapshot, root_of, visible

from replay_lib.errors import IncompleteSnapshotError, SnapshotError, UsageError
from replay_lib.finding import locate_path
from replay_lib.preserving import Preserved, placing, preserve
from replay_lib.preserving import keeping as keeping_module
from replay_lib.preserving.hashing import fill, locked
from replay_lib.preserving.many import preserve_each, task_named
from replay_lib.record import ledger
from replay_lib.record.task import Task
from replay_lib.snapshot import open_snapshot
from replay_lib.snapshot.preserved import check_preserved


def test_large_files_are_linked_and_small_ones_copied(source: Path) -> None:
    before = content(source)
    done = preserve(source, task="job-a", role="actor")
    assert done.path == root_of(source) / "iter_0000085"
    assert (done.already, done.source_gone, done.cleared) == (False, False, ())
    for name, kept in done.manifest.files.items():
        same = (done.path / name).stat().st_ino == (source / name).stat().st_ino
        assert same == name.endswith(".distcp") == (kept.how == "linked"), name
        assert kept.mtime_ns == (source / name).stat().st_mtime_ns
        assert (kept.sha256 is None) == (kept.how == "linked")
    assert set(done.manifest.files) == set(before)
    assert content(source) == before
    shutil.rmtree(source)
    kept_content = content(done.path)
    kept_content.pop("preserved.json")
    assert kept_content == before
    opened = open_snapshot(done.path)
    assert (opened.step, len(opened.sizes)) == (85, len(before))


def test_a_file_over_the_size_is_linked_whatever_it_is(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "LINK_BYTES", (source / "batch_rank0.pt").stat().st_size)
    done = preserve(source)
    assert done.manifest.files["batch_rank0.pt"].how == "linked"
    assert done.manifest.files["trainer.pt"].how == "copied"


def test_once_more_is_told_and_does_nothing(source: Path) -> None:
    preserve(source)
    before = content(root_of(source))
    again = preserve(source)
    assert (again.already, again.path) == (True, root_of(source) / "iter_0000085")
    of_itself = preserve(again.path)
    assert (of_itself.already, of_itself.source) == (True, source)
    shutil.rmtree(source)
    assert preserve(again.path).source_gone
    after = content(root_of(source))
    assert {k: v for k, v in after.items() if ".locks" not in k} == {
        k: v for k, v in before.items() if ".locks" not in k
    }


def refusing(code: int) -> Callable[[Path, Any], None]:
    def refuse(_self: Path, _target: Any) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_what_cannot_be_linked_is_copied(
    source: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    before = content(source)
    monkeypatch.setattr(Path, "hardlink_to", refusing(code))
    told: list[tuple[int, int]] = []
    done = preserve(source, tell=lambda done, total, _: told.append((done, total)))
    assert done.manifest.linked == 0
    size = sum(len(data) for data, _ in before.values())
    assert told[-1] == (size, size)
    kept = content(done.path)
    kept.pop("preserved.json")
    assert kept == before == content(source)
    with (source / "__0_0.distcp").open("r+b") as file:
        file.write(b"\x00" * 64)
    open_snapshot(done.path)  # nothing of it is shared


def test_a_full_disk_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(source)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written \\(No space left on device\\)"):
        preserve(source)
    assert visible(root_of(source)) == []
    assert content(source) == before
    monkeypatch.undo()
    assert not preserve(source).already


@pytest.mark.parametrize("kind", ["out", "dangling", "pipe"])
def test_only_regular_files_are_taken(source: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("x")
    odd = source / "extra.bin"
    if kind == "out":
        odd.symlink_to(tmp_path / "secret")
    elif kind == "dangling":
        odd.symlink_to(tmp_path / "absent")
    else:
        os.mkfifo(odd)
    with pytest.raises(SnapshotError, match=r"extra\.bin: found (a link to|neither a file)"):
        preserve(source)
    assert visible(root_of(source)) == []


def test_links_inside_and_directories_are_taken_as_files(source: Path) -> None:
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "merges.txt").write_text("a b")
    (source / "alias.pt").symlink_to("trainer.pt")
    done = preserve(source, settled=0)
    assert (done.path / "tokenizer" / "merges.txt").read_text() == "a b"
    assert not (done.path / "alias.pt").is_symlink()
    assert (done.path / "alias.pt").read_bytes() == (source / "trainer.pt").read_bytes()


def test_an_unfinished_snapshot_is_not_taken(source: Path) -> None:
    (source / "batch_rank1.pt").unlink()
    with pytest.raises(IncompleteSnapshotError, match="Wait until all ranks have finished"):
        preserve(source)
    assert not root_of(source).exists()


def test_one_that_is_still_written_is_waited_for(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(source / "grad_info_rank0.pt", None)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) < 3:
            (source / f"late{len(slept)}.pt").touch()

    monkeypatch.setattr("replay_lib.preserving.source.time.sleep", sleep)
    assert "late2.pt" in preserve(source).manifest.files
    assert slept == [3.0, 3.0, 3.0]


def test_a_file_that_changes_meanwhile_stops_it(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = keeping_module.place_files

    def written(*arguments: Any) -> Any:
        placed = place(*arguments)
        (source / "late.pt").touch()
        return placed

    monkeypatch.setattr(keeping_module, "place_files", written)
    with pytest.raises(SnapshotError, match=r"is being written \(late\.pt changed\)"):
        preserve(source)
    assert visible(root_of(source)) == []


def test_the_trainer_wrote_the_step_again(source: Path) -> None:
    done = preserve(source)
    for name in ("batch_rank0.pt", "__0_0.distcp"):
        (source / name).unlink()
        (source / name).write_bytes(b"PK another run")
    with pytest.raises(SnapshotError, match="found 2 files that are not those preserved"):
        preserve(source)
    open_snapshot(done.path)


def test_a_directory_that_somebody_made_by_hand_is_left_alone(source: Path) -> None:
    shutil.copytree(source, root_of(source) / "iter_0000085")
    with pytest.raises(SnapshotError, match=r"without preserved\.json, not made by this command"):
        preserve(source)


def test_two_at_once_do_the_work_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, inside, go_on = keeping_module.place_files, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return place(*arguments)

    monkeypatch.setattr(keeping_module, "place_files", slowly)
    results: list[Preserved] = []
    first = threading.Thread(target=lambda: results.append(preserve(source)))
    first.start()
    assert inside.wait(30)
    second = threading.Thread(
        target=lambda: results.append(preserve(source, waiting=lambda _: go_on.set()))
    )
    second.start()
    first.join(30)
    second.join(30)
    assert sorted(done.already for done in results) == [False, True]
    assert visible(root_of(source)) == ["iter_0000085"]


def test_broken_manifests_are_refused_by_field(source: Path) -> None:
    kept = preserve(source).path
    file = kept / "preserved.json"
    raw = json.loads(file.read_text())
    raw["files"]["../x"] = raw["files"]["trainer.pt"]
    for broken, told in (
        (raw, "files: found '../x'"),
        (raw | {"schema": 2}, "A newer version of this package wrote it"),
        (raw | {"files": {"a": {"size": -1}}}, r"files\.a\.size: found -1"),
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(SnapshotError, match=told):
            open_snapshot(kept)


def test_the_command_on_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = make_output(tmp_path, "x~job-a__actor", [85, 90, 95])
    (output / "checkpoints/spike_snapshots/iter_0000090/trainer.pt").unlink()
    ran = Ran(capsys, "preserve", output, "--no-hash", "--json")
    assert ran.code == 3
    assert [one["step"] for one in ran.document["preserved"]] == [85, 95]
    assert "trainer.pt: found no such file" in ran.document["error"]["message"]
    events = ledger.read(Task("job-a"))
    assert [(e.kind, Path(e.data["preserved"]).name) for e in events] == [
        ("preserved", "iter_0000085"),
        ("preserved", "iter_0000095"),
    ]
    assert {"snapshot", "preserved", "files", "bytes", "how"} == set(events[0].data)
    again = Ran(capsys, "preserve", output / "checkpoints/spike_snapshots/iter_0000085", "--verify")
    assert again.code == 0
    assert "preserved already" in again.out
    assert "every file was read" in again.out
    assert len(ledger.read(Task("job-a"))) == 2


def test_the_command_without_a_task_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = make_snapshot(tmp_path / "spike_snapshots", 85)
    ran = Ran(capsys, "preserve", source, "--no-hash", "--json")
    assert ran.code == 0
    assert ran.document["task"] is None
    assert "name a task with --task JOB" in ran.err
    named = Ran(capsys, "preserve", source, "--no-hash", "--task", "job-b", "--json")
    assert named.document["task"] == "job-b"
    assert [e.kind for e in ledger.read(Task("job-b"))] == ["preserved"]


def test_the_background_fills_in_what_is_not_known(source: Path) -> None:
    done = preserve(source, background=True)
    assert done.hashing is not None
    _, status = os.waitpid(done.hashing, 0)
    assert status == 0
    manifest = check_preserved(done.path)
    assert manifest is not None
    assert manifest.hashed == len(manifest.files)
    assert preserve(source, background=True).hashing is None
    for name, kept in manifest.files.items():
        assert kept.sha256 == hashlib.sha256((source / name).read_bytes()).hexdigest()


def test_only_one_process_fills_in(source: Path) -> None:
    kept = preserve(source).path
    with locked(kept, "sha256", seconds=0):
        assert fill(kept) is None
    (source / "__0_0.distcp").touch()
    filled = fill(kept)  # one that changed is left out: whoever opens it is told
    assert filled is not None
    assert filled.files["__0_0.distcp"].sha256 is None
    assert filled.hashed == len(filled.files) - 1


def test_what_killed_commands_left_is_told_and_removed(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parents[3])
    root_of(source).mkdir()
    part = killed_while_building(root_of(source) / "iter_0000080")
    assert f"left by a killed command: {part.name}" in Ran(capsys, "find", source).out
    ran = Ran(capsys, "preserve", source, "--no-hash")
    assert f"removed what a killed command had left: {part.name}" in ran.out
    assert visible(root_of(source)) == ["iter_0000085"]


def test_who_may_only_read_is_told_that_it_is_preserved(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = preserve(source, verified=True)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("replay_lib.preserving.hashing.FileLock", refuse)
    assert preserve(source).already
    assert preserve(done.path, verified=True).verified
    shutil.rmtree(done.path)
    with pytest.raises(UsageError, match="a lock that cannot be made"):
        preserve(source)


def test_a_job_that_could_be_no_task_is_preserved_without_one(tmp_path: Path) -> None:
    output = make_output(tmp_path, "x~job a__actor", [85])
    assert task_named(locate_path(output), None) is None
    (attempt,) = preserve_each(locate_path(output), None)
    assert attempt.error is None
