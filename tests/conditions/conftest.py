"""What every condition starts from: the good snapshot, changed and written again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replay_lib.snapshot import Content, Snapshot, open_snapshot, read_content, write_snapshot

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


@pytest.fixture(scope="session")
def plain() -> Path:
    return PLAIN


@pytest.fixture(scope="session")
def content() -> Content:
    return read_content(open_snapshot(PLAIN))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The snapshot as AXRL wrote it, to be changed in place."""
    return Path(shutil.copytree(PLAIN, tmp_path / "copy" / PLAIN.name))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Content], Snapshot]:
    """A content as a snapshot on disk."""
    return lambda content: write_snapshot(tmp_path / "written" / "iter_0000085", content)
