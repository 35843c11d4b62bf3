"""One worker for the embedded snapshot, shared by every test of this folder that can share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_lib.engine.session import ReplaySession

SNAPSHOT = Path(__file__).parents[2] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


@pytest.fixture(scope="session")
def plain_path() -> Path:
    return SNAPSHOT


@pytest.fixture(scope="session")
def plain() -> Iterator[ReplaySession]:
    with ReplaySession.open(SNAPSHOT, device="cpu") as session:
        yield session
