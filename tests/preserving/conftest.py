"""A trainer's snapshot, in an output directory that names its job."""

from __future__ import annotations

from pathlib import Path

import pytest
from output_trees import make_snapshot


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_snapshot(tmp_path / "x~job-a__actor" / "checkpoints" / "spike_snapshots", 85)
