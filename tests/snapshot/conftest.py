"""The two snapshots that AXRL itself wrote, and copies of them to break."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replay_lib.snapshot import Content, export_snapshot, open_snapshot, read_content

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "spike_cases" / "axrl-plain-step85" / "snapshot" / "iter_0000085"
MERGED = ROOT / "tests" / "data" / "snap" / "merged" / "iter_0000085"


@pytest.fixture
def plain() -> Path:
    return PLAIN


@pytest.fixture
def merged() -> Path:
    return MERGED


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a snapshot that a test may change."""

    def make(source: Path) -> Path:
        return Path(shutil.copytree(source, tmp_path / source.name))

    return make


@pytest.fixture
def broken_plain(copy: Callable[[Path], Path]) -> Path:
    """A copy of the plain snapshot, to be changed."""
    return copy(PLAIN)


@pytest.fixture(scope="session")
def content() -> Content:
    """All that the plain snapshot holds."""
    return read_content(open_snapshot(PLAIN))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain snapshot, exported; not to be changed."""
    out = tmp_path_factory.mktemp("portable") / "plain"
    return export_snapshot(open_snapshot(PLAIN), out).path


@pytest.fixture
def broken(copy: Callable[[Path], Path], exported: Path) -> Path:
    """A copy of it, to be changed."""
    return copy(exported)
