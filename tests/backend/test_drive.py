"""A whole job of the backend, with a worker of AXRL's contract in the place of AXRL's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_lib.backend import session as session_module
from replay_lib.backend.session import open_axrl
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import PatchError, UsageError
from replay_lib.snapshot import load_batch, open_snapshot
from replay_lib.trainers.axrl_source import VARIABLE

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
STAGE = Path(__file__).parent / "stage"
CALLS = (
    "baseline",
    "enable-token-mismatch-tis-max2",
    "seam_examples:smaller_advantage",
    "disable-routing-replay",
    "replay-r3-on-loss-tokens-only",
    "seam_examples:nan_advantage",
)


@pytest.fixture
def on_stage(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, str(STAGE))
    monkeypatch.setattr(session_module, "missing_for_backend", lambda _snapshot: [])
    monkeypatch.setattr(session_module, "DEVICE", "cpu")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


@pytest.mark.xdist_group("engine-backend")
def test_experiments_go_through_the_worker_on_every_rank_story(on_stage) -> None:
    snapshot = open_snapshot(SNAPSHOT)
    batches = [load_batch(snapshot, rank) for rank in range(2)]
    weight = 2 * sum(float(b.advantage.abs().sum()) for b in batches)
    with open_axrl(SNAPSHOT) as session:
        info = session.info
        assert (info.backend, info.trainer, info.fidelity) == ("axrl", "axrl", "full")
        assert info.layout == {"dp": 2, "tp": 1, "pp": 1, "cp": 1, "ep": 1}
        assert info.dtype == "float32" and info.parameters > 0 and not info.deterministic
        with pytest.raises(PatchError, match="backend axrl: seam_examples:weighted_tokens acts"):
            session.run(Experiment.parse("seam_examples:weighted_tokens"))
        shares: list[float] = []
        asked = [Experiment.parse(call) for call in CALLS]
        plain, tis, quarter, without, loss_only, spoilt = session.run_many(asked, shares.append)
        again = session.run(Experiment.baseline())
        with pytest.raises(UsageError, match="backend axrl: it cannot do 'bare'"):
            session.bare_seconds(1)
    assert shares == pytest.approx([n / 6 for n in range(1, 7)])
    assert plain.grad_norm_preclip == pytest.approx(weight + 1000.0, rel=1e-6)
    assert tis.grad_norm_preclip == pytest.approx(plain.grad_norm_preclip + 2.0)
    assert quarter.grad_norm_preclip == pytest.approx(weight / 4 + 1000.0)
    assert without.grad_norm_preclip == pytest.approx(weight)
    assert loss_only.grad_norm_preclip == pytest.approx(weight + 1500.0)
    assert spoilt.grad_norm_preclip != spoilt.grad_norm_preclip
    assert spoilt.nonfinite == ("NaN/Inf in replayed gradients",)
    assert again.digest == plain.digest and tis.digest != plain.digest
    assert {str(s) for s in tis.touched} == {"settings"} and sum(tis.touched.values()) == 1
    assert plain.touched == {} and sum(without.touched.values()) > 0
