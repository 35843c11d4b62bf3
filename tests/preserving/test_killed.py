"""SIGKILL at random points, two at once, a rotation in the middle, a full disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from output_trees import content, make_snapshot

from replay_lib.errors import IncompleteSnapshotError, UsageError
from replay_lib.preserving import keeping, preserve
from replay_lib.snapshot import open_snapshot
from replay_lib.unfinished import leftovers

DRIVER = Path(__file__).with_name("kill_driver.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_snapshot(tmp_path / "x~job-a__actor" / "checkpoints" / "spike_snapshots", 85)


def drive(source: Path, what: str, kills: int) -> dict[str, Any]:
    job = {"what": what, "source": str(source), "kills": kills, "seed": 6}
    ended = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        cwd=source.parents[3],
        env=os.environ | {"PYTHONPATH": str(DRIVER.parents[2])},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def test_preserve_is_killed_fifty_times(source: Path) -> None:
    told = drive(source, "preserve", 50)
    assert len(told["states"]) == 50
    assert set(told["states"]) == {"absent", "whole"}
    assert told["half"] > 20  # most kills came while it was built


def test_release_is_killed(source: Path) -> None:
    told = drive(source, "release", 30)
    assert set(told["states"]) == {"absent", "whole"}


def test_what_fills_in_and_compares_is_killed(source: Path) -> None:
    assert set(drive(source, "read", 20)["states"]) == {"whole"}


def test_two_processes_at_once(source: Path) -> None:
    told = drive(source, "two", 5)
    assert told == {"states": ["whole"] * 5, "already": [["0", "1"]] * 5}


class Rotation:
    """Deletes the source as the trainer does, when ``after`` files have been linked."""

    def __init__(self, source: Path, after: int) -> None:
        self.source, self.left, self.lock = source, after, threading.Lock()
        self.link = Path.hardlink_to

    def __call__(self, path: Path, target: Path) -> None:
        with self.lock:
            if self.left == 0:
                shutil.rmtree(self.source, ignore_errors=True)
            self.left -= 1
            self.link(path, target)


@pytest.mark.parametrize("after", [0, 1, 7, 15])
def test_a_rotation_that_is_faster_leaves_nothing_half(
    source: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    assert len(list(source.iterdir())) == 16
    other = preserve(make_snapshot(source.parent, 90)).path
    rotation = Rotation(source, after)

    def link(path: Path, target: Path) -> None:
        rotation(path, target)

    monkeypatch.setattr(Path, "hardlink_to", link)
    told = r"was deleted while it was preserved \(\d+ of 16 files taken\)"
    with pytest.raises(IncompleteSnapshotError, match=told) as caught:
        preserve(source)
    assert "what was preserved before is as it was" in str(caught.value)
    assert [p.name for p in other.parent.iterdir() if p.name != ".locks"] == [other.name]
    open_snapshot(other)


def test_once_all_is_linked_a_rotation_takes_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(source)
    copy = keeping.place_files.__globals__["_copy_all"]

    def rotated(*arguments: Any) -> Any:
        shutil.rmtree(source)
        return copy(*arguments)

    monkeypatch.setitem(keeping.place_files.__globals__, "_copy_all", rotated)
    done = preserve(source)
    assert done.source_gone
    kept = content(done.path)
    kept.pop("preserved.json")
    assert kept == before


@pytest.mark.parametrize(("first", "is_whole"), [("__1_0.distcp", False), ("common.pt", True)])
def test_a_rotation_that_had_begun(
    source: Path, monkeypatch: pytest.MonkeyPatch, first: str, is_whole: bool
) -> None:
    """A file is gone before any is taken: the checkpoint's own table tells whether it matters."""
    real = keeping.place_files

    def rotated(*arguments: Any) -> Any:
        placed = real(*arguments)
        shutil.rmtree(source)
        return placed

    (source / first).unlink()
    monkeypatch.setattr(keeping, "place_files", rotated)
    if is_whole:
        assert preserve(source).source_gone
        return
    with pytest.raises(IncompleteSnapshotError, match="was deleted while it was preserved"):
        preserve(source)
    assert leftovers(source.parent.with_name("spike_snapshots-active")) == []


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 7 MiB of its own; needs root, and a kernel that lets it mount."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up(tmpfs: Path) -> None:
    source = make_snapshot(tmpfs / "spike_snapshots", 85)
    before = content(source)
    filler = tmpfs / "filler"
    room = shutil.disk_usage(tmpfs).free
    filler.write_bytes(bytes(room - (64 << 10)))  # what is copied takes three times as much
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\)"):
        preserve(source)
    root = tmpfs / "spike_snapshots-active"
    assert [p.name for p in root.iterdir() if p.name != ".locks"] == []
    assert content(source) == before
    filler.unlink()
    assert not preserve(source).already


@pytest.mark.parametrize("fits", [True, False])
def test_another_file_system_gets_copies(source: Path, tmpfs: Path, fits: bool) -> None:
    before = content(source)
    root = source.parent.with_name("spike_snapshots-active")
    root.symlink_to(tmpfs)  # as a mount at that place: no link reaches there
    if not fits:
        (tmpfs / "filler").write_bytes(bytes(4 << 20))
        with pytest.raises(UsageError, match="No space left on device"):
            preserve(source)
        assert {p.name for p in tmpfs.iterdir()} <= {".locks", "filler"}
    else:
        done = preserve(source)
        assert done.manifest.linked == 0
        assert done.manifest.hashed == 16
    assert content(source) == before
