"""What a case states about its step, and mistakes that are told before anything is started."""

from __future__ import annotations

from pathlib import Path

import fake_engine
import pytest

from replay_lib import run
from replay_lib.case import Case
from replay_lib.errors import CaseError, PatchError
from replay_lib.methods import load_methods

SNAPSHOT = Path(__file__).parents[1] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


def test_nothing_is_started_for_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(run, "open_engine", started)
    with pytest.raises(PatchError, match="not registered"):
        run.parse_experiments(["no-such-method"], "baseline", load_methods())
    with pytest.raises(PatchError, match="not registered"):
        run.parse_experiments(["disable-routing-replay"], "no-such-method", load_methods())
    gone = Case(name="gone", snapshot=tmp_path / "iter_0000001")
    with pytest.raises(CaseError, match="no directory"):
        run.OpenCase.open(gone, run.ReplayOptions())


def test_recorded_figures_are_the_snapshots() -> None:
    recorded = run.recorded_of(SNAPSHOT)
    assert recorded.norm == fake_engine.RECORDED
    assert (recorded.spike_ratio, recorded.dtype, recorded.clip_grad) == (2.0, "float32", 1.0)
