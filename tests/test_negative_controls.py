"""Each way to get a step wrong turns red, each for its own reason: tests for the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from replay_lib import run
from replay_lib.batch import RankBatch
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.record.result import Result
from replay_lib.rule import Flag, Verdict
from replay_lib.run import OpenCase, ReplayOptions
from replay_lib.snapshot import open_snapshot, read_content, write_snapshot

ROOT = Path(__file__).parents[1]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
CPU = ReplayOptions(device="cpu")
METHOD = "disable-routing-replay"


def judged(path: Path, *names: str) -> dict[str, Result]:
    opened = OpenCase.open(Case.from_snapshot(path), CPU)
    try:
        results = opened.results([Experiment.parse(name) for name in names])
        return {r.experiment: r for r in results}
    finally:
        opened.close()


@pytest.fixture
def with_batch(tmp_path) -> Callable[[Callable[[RankBatch], RankBatch]], Path]:
    """A copy of the embedded snapshot whose first rank's batch was changed."""

    def write(change: Callable[[RankBatch], RankBatch]) -> Path:
        content = read_content(open_snapshot(PLAIN))
        batches = (change(content.batches[0]), *content.batches[1:])
        return write_snapshot(tmp_path / "iter_0000085", replace(content, batches=batches)).path

    return write


@pytest.fixture(scope="module")
def sound() -> dict[str, Result]:
    names = ("keeps_nothing", "touches_nothing", "nan_advantage")
    return judged(PLAIN, "baseline", METHOD, *(f"seam_examples:{name}" for name in names))


def test_the_control_of_the_controls(sound):
    assert sound["baseline"].verdict is Verdict.REPRODUCED
    assert sound[METHOD].verdict is Verdict.FAIL


def test_a_rewritten_snapshot_is_the_same_step(with_batch):
    assert judged(with_batch(lambda b: b), "baseline")["baseline"].verdict is Verdict.REPRODUCED


def swapped_rows(batch: RankBatch) -> RankBatch:
    """Experts of the first two real rows exchanged, as far as both go."""
    first, second = (int(i) for i in (batch.index >= 0).nonzero().flatten()[:2])
    routes = [r.clone() for r in batch.routes]
    n = min(len(routes[first]), len(routes[second]))
    routes[first][:n], routes[second][:n] = batch.routes[second][:n], batch.routes[first][:n]
    return batch.replace(routes=tuple(routes))


def shifted_routes(batch: RankBatch) -> RankBatch:
    """Every token with the experts of the token before it."""
    return batch.replace(routes=tuple(r.roll(1, dims=0) for r in batch.routes))


@pytest.mark.parametrize("change", [swapped_rows, shifted_routes], ids=lambda f: f.__name__)
def test_wrong_routes_do_not_reproduce_the_step(with_batch, change):
    results = judged(with_batch(change), "baseline", METHOD)
    for result in results.values():
        assert result.verdict is Verdict.NOT_REPRODUCED
        assert "1e-05 is allowed" in result.reason


def test_a_nan_in_the_recorded_batch_is_named(with_batch):
    def spoil(batch: RankBatch) -> RankBatch:
        advantage = batch.advantage.clone()
        row, token = (int(x) for x in batch.loss_mask.nonzero()[0])
        advantage[row, token] = float("nan")
        return batch.replace(advantage=advantage)

    result = judged(with_batch(spoil), "baseline")["baseline"]
    assert result.verdict is Verdict.NON_FINITE
    assert "dLoss/dlogprob of dp rank 0 row" in result.reason


def test_a_patch_that_makes_a_nan_is_non_finite(sound):
    result = sound["seam_examples:nan_advantage"]
    assert result.verdict is Verdict.NON_FINITE
    assert "dLoss/dlogprob of dp rank 0 row" in result.reason


def test_a_mask_that_keeps_nothing_is_degenerate(sound):
    result = sound["seam_examples:keeps_nothing"]
    assert (result.ratio, result.rule) == (0.0, Verdict.PASS)  # the bare rule would be content
    assert result.verdict is Verdict.DEGENERATE and Flag.DEGENERATE in result.flags
    assert "it keeps too little of the signal" in result.reason


def test_a_patch_that_touches_nothing_is_no_op(sound):
    result = sound["seam_examples:touches_nothing"]
    assert result.verdict is Verdict.NO_OP
    assert result.reason == "the patch touched nothing"


def test_a_zeroed_gradient_does_not_reproduce_the_step(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("PLANTED_FAULT", "zero-gradient")

    def open_faulty(snapshot: Path, _options: ReplayOptions) -> ReplaySession:
        return ReplaySession.open(snapshot, device="cpu", worker_module="faulty_worker")

    monkeypatch.setattr(run, "open_engine", open_faulty)
    result = judged(PLAIN, "baseline")["baseline"]
    assert result.verdict is Verdict.NOT_REPRODUCED
    assert result.red
