"""A good snapshot's content, changed and written again, and what the doctor says to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replay_lib.analysis import Examined, examine
from replay_lib.snapshot import Content, open_snapshot, read_content, write_snapshot

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


@pytest.fixture(scope="session")
def content() -> Content:
    return read_content(open_snapshot(PLAIN))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The plain snapshot as AXRL wrote it, to be changed."""
    return Path(shutil.copytree(PLAIN, tmp_path / "copy" / PLAIN.name))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Content], Examined]:
    """What the doctor says to a content, written as a snapshot."""

    def write(content: Content) -> Examined:
        return examine(write_snapshot(tmp_path / "written" / "iter_0000085", content).path)

    return write
