"""Steps recorded by Megatron-Core on two ranks, replayed on one and on two.

On two GPUs through NCCL with half a billion parameters (``pytest -m multigpu``), and the same on
the CPU through gloo with a tiny model: only the device and the recipe differ.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from replay_lib.engine.machine import cuda_devices
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import EngineError
from replay_lib.zoo import make_spike
from replay_lib.zoo.native import LayoutStep, parse_parallel, record_steps
from replay_lib.zoo.recipe import HALF_BILLION, Recipe

sys.path.append(str(Path(__file__).parents[1] / "zoo"))
from tiny_zoo import TINY

LAYOUTS = ("dp=2", "ep=2", "tp=2", "pp=2")
#: Float32 sums in another order, along all layers. A gradient that is summed over the wrong ranks
#: is off by parts in a hundred.
NORM = 1e-5
#: Of each parameter between one rank and two: small parameters carry the rounding of all others.
PARAMETER = 1e-3

SMALL = TINY.model_copy(update={"shape": TINY.shape.model_copy(update={"groups": 2})})
BOTH = [
    pytest.param("cpu", id="cpu", marks=pytest.mark.slow),
    pytest.param("cuda", id="cuda", marks=[pytest.mark.multigpu, pytest.mark.timeout(900)]),
]
pytestmark = pytest.mark.xdist_group("two-ranks")


@dataclass(frozen=True)
class Steps:
    """Snapshots by layout, with the norm that each recorded."""

    device: str
    made: dict[str, tuple[Path, float]]


def recipe_of(device: str) -> Recipe:
    return HALF_BILLION if device == "cuda" else SMALL


@pytest.fixture(scope="module", params=BOTH)
def steps(request, tmp_path_factory) -> Iterator[Steps]:
    """One run is trained on one rank; its step is recorded on every layout in one job."""
    device = request.param
    if device == "cuda" and cuda_devices() < 2:
        reason = f"{cuda_devices()} NVIDIA devices are visible here, two are needed"
        if request.config.getoption("--require-device"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("two-ranks")
    recipe = recipe_of(device)
    report = make_spike("poisoned-row", seed=3, out=home / "one", cache=home / "c", recipe=recipe)
    source = home / "one" / report["snapshot"]
    wanted = [LayoutStep(source, home / t / source.name, parse_parallel(t)) for t in LAYOUTS]
    told = record_steps(wanted, device=device)
    off = {t: abs(r["norm"] / report["norm"] - 1) for t, r in zip(LAYOUTS, told, strict=True)}
    print(f"recorded on two ranks against one: {off}")
    assert max(off.values()) <= NORM
    yield Steps(
        device,
        {t: (s.target, r["norm"]) for t, s, r in zip(LAYOUTS, wanted, told, strict=True)},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recorded_layout_replays_on_one_rank_and_on_its_own(steps, layout):
    path, norm = steps.made[layout]
    found = {}
    for on in ("dp=1", layout):
        with ReplaySession.open(path, device=steps.device, layout=on) as session:
            assert session.info.fidelity == ("full" if on == layout else "folded")
            one, two = session.run(Experiment.baseline()), session.run(Experiment.baseline())
        print(f"{layout} on {on}: {one.grad_norm_preclip / norm - 1}, {one.seconds} s")
        assert abs(one.grad_norm_preclip / norm - 1) <= NORM
        assert one.digest == two.digest
        found[on] = one.param_norms
    one_rank, own = found["dp=1"], found[layout]
    assert set(own) == set(one_rank)
    assert max(abs(own[n] - one_rank[n]) / one_rank[n] for n in own) <= PARAMETER


def test_a_killed_rank_ends_the_run_with_one_error(steps):
    path, _ = steps.made["tp=2"]
    with ReplaySession.open(path, device=steps.device, layout="tp=2") as session:
        os.kill(ranks_of(session)[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineError) as told:
            session.run(Experiment.baseline())
        assert time.monotonic() - start <= 60
    assert str(told.value).strip()


def ranks_of(session: ReplaySession) -> list[int]:
    """Process ids of the session's ranks, in rank order."""
    import psutil

    children = psutil.Process(session._worker.process.pid).children()
    workers = [c for c in children if "RANK" in c.environ()]
    return [c.pid for c in sorted(workers, key=lambda c: int(c.environ()["RANK"]))]
