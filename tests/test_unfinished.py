"""Directories under a hidden name: the builder's while it lives, then anybody's to clear."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest
from killed_builders import killed_while_building

from replay_lib import unfinished
from replay_lib.unfinished import (
    clear_leftovers,
    hidden_sibling,
    leftovers,
    remove_whole,
    take_place_of,
)


def test_a_block_that_ends_leaves_the_target_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with hidden_sibling(target) as part:
        (part / "file").write_text("x")
        take_place_of(part, target)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(KeyError), hidden_sibling(tmp_path / "other") as part:
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_builder_left_is_seen_and_cleared(tmp_path: Path) -> None:
    part = killed_while_building(tmp_path / "out")
    assert leftovers(tmp_path) == leftovers(tmp_path, "out") == [part]
    assert leftovers(tmp_path, "other") == []
    with hidden_sibling(tmp_path / "out") as mine:
        assert clear_leftovers(tmp_path) == [part]
        assert mine.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_other_hidden_directories_are_nobodys(tmp_path: Path) -> None:
    for name in (".git", ".out.abcd1234", ".out.vm-abcd1234.part.d", "out.vm-abcd1234.part"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.vm-abcd1234.part").touch()
    (tmp_path / "x").mkdir()
    (tmp_path / ".out.vm-abcd1235.part").symlink_to(tmp_path / "x")
    assert clear_leftovers(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 7
    assert clear_leftovers(tmp_path / "absent") == []


def test_another_hosts_is_cleared_after_a_day(tmp_path: Path) -> None:
    part = tmp_path / ".out.somewhere-abcd1234.part"
    part.mkdir()
    assert leftovers(tmp_path) == []
    old = time.time() - unfinished.ABANDONED_SECONDS - 1
    os.utime(part, (old, old))
    assert clear_leftovers(tmp_path) == [part]


def test_where_locks_say_nothing_age_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EBADF, "no locks on directories here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with hidden_sibling(tmp_path / "out") as part:
        assert leftovers(tmp_path) == []
        old = time.time() - unfinished.ABANDONED_SECONDS - 1
        os.utime(part, (old, old))
        assert leftovers(tmp_path) == [part]


def test_removing_hides_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "file").touch()
    seen: list[list[str]] = []

    def killed(path: Path) -> None:
        seen.append([p.name for p in path.parent.iterdir()])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("replay_lib.unfinished.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_whole(directory)
    assert len(seen[0]) == 1
    assert seen[0][0].startswith(".out.")
    assert [p.name for p in clear_leftovers(tmp_path)] == seen[0]
    directory.mkdir()
    remove_whole(directory)
    assert list(tmp_path.iterdir()) == []


def test_the_longest_names_have_hidden_ones(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        with hidden_sibling(tmp_path / name) as part:
            assert leftovers(tmp_path, name) == []
            take_place_of(part, tmp_path / name)
