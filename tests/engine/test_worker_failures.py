"""A worker that dies, hangs or fails on one rank is one clear error, in time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from replay_lib.engine import early
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import EngineError, UsageError, WeightsError

BASELINE = Experiment.baseline()
TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def faulty(plain_path, monkeypatch):
    """Open a session whose worker has one planted fault (see faulty_worker.py)."""

    def start(fault: str, **options) -> ReplaySession:
        monkeypatch.setenv("PYTHONPATH", TESTS)
        monkeypatch.setenv("PLANTED_FAULT", fault)
        return ReplaySession.open(
            plain_path, device="cpu", worker_module="faulty_worker", **options
        )

    return start


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(p) for p in listed.stdout.split()]


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_killed_worker_is_one_error_with_the_end_of_its_log(plain_path):
    with ReplaySession.open(plain_path, device="cpu") as session:
        torchrun = session._worker.process.pid
        os.kill(children_of(torchrun)[0], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineError, match="the worker"):
            session.run(BASELINE)
        assert time.monotonic() - start <= 60
    assert session._worker.process.poll() is not None


def test_a_hanging_worker_is_ended_after_the_limit(faulty):
    with faulty("hang", silence_timeout_s=3) as session:
        ranks = children_of(session._worker.process.pid)
        with pytest.raises(EngineError, match="said nothing for 3 s and was ended"):
            session.run(BASELINE)
        assert session._worker.process.poll() is not None
        assert ranks and not any(alive(pid) for pid in ranks)


def test_a_rank_does_not_outlive_its_torchrun(faulty):
    with faulty("hang") as session:
        torchrun = session._worker.process.pid
        ranks = children_of(torchrun)
        session._worker.send({"op": "run", "experiments": [BASELINE.model_dump(mode="json")]})
        os.kill(torchrun, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while any(alive(pid) for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ranks and not any(alive(pid) for pid in ranks)


def test_one_failing_rank_brings_the_others_down(faulty):
    with faulty("raise-on-rank-1", layout="dp=2") as session:
        start = time.monotonic()
        with pytest.raises(EngineError) as caught:
            session.run(BASELINE)
        assert time.monotonic() - start <= 60
    assert "planted fault on rank 1" in str(caught.value)


def test_out_of_memory_says_what_to_do(faulty):
    with faulty("out-of-memory") as session, pytest.raises(EngineError) as caught:
        session.run(BASELINE)
    assert str(caught.value).startswith("out of memory on the device: replay fewer ranks")


def test_a_worker_that_cannot_start_shows_why(plain_path, monkeypatch):
    with pytest.raises(EngineError, match=r"No module named '?no_such_worker"):
        ReplaySession.open(plain_path, device="cpu", worker_module="no_such_worker")


def test_what_cannot_fit_is_refused_before_loading(faulty):
    with pytest.raises(EngineError, match=r"needs about .* GiB on cpu, 0\.0 GiB are free; nothing"):
        faulty("no-memory")


def test_a_zeroed_gradient_is_not_the_recorded_one(faulty, plain):
    with faulty("zero-gradient") as session:
        faulted = session.run(BASELINE)
    sound = plain.run(BASELINE)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    assert faulted.param_norms[name] == 0.0 < sound.param_norms[name]
    assert abs(faulted.grad_norm_preclip / sound.grad_norm_preclip - 1) > 1e-5


def test_whatever_shows_whether_replays_repeat_has_backwards_of_its_own(faulty):
    """Every backward of this worker differs from the one before, as on a device that is not
    deterministic: a shared one is told by its digest."""
    idle, other = (
        "seam_examples:smaller_advantage:factor=1.0",
        "clip-rollout-log-ratio",
    )  # the baseline's loss
    weights = "seam_examples:scaled_router"  # replayed with stored and with carried old log-probs
    names = ("baseline", "baseline", idle, other, idle, weights, weights)
    with faulty("drifting-backward") as session:
        outcomes = list(session.run_many([Experiment.parse(name) for name in names]))
    digests = [outcome.digest for outcome in outcomes]
    assert digests[2] == digests[3]  # nobody asks for these to be apart
    assert len(set(digests)) == len(names) - 1
    first, again = outcomes[5:]
    assert first.grad_norm_preclip_carried != again.grad_norm_preclip_carried
    assert again.cosine_carried is not None


def test_a_router_that_ignores_the_routes_is_refused(faulty):
    with faulty("deaf-router") as session, pytest.raises(EngineError) as caught:
        session.run(BASELINE)
    assert "the routers did not use the saved experts: tokens routed elsewhere" in str(caught.value)


def test_a_snapshot_without_a_parameter_is_refused_by_name(plain_path, tmp_path):
    from dataclasses import replace

    from replay_lib.snapshot import open_snapshot, read_content, write_snapshot

    content = read_content(open_snapshot(plain_path))
    tensors = dict(content.tensors)
    tensors["decoder.final_norm.weight"] = tensors.pop("decoder.final_layernorm.weight")
    tensors["output_layer.weight"] = tensors["output_layer.weight"][:64].clone()
    bad = write_snapshot(tmp_path / "iter_0000085", replace(content, tensors=tensors))
    with pytest.raises(WeightsError) as caught:
        ReplaySession.open(bad.path, device="cpu")
    assert str(caught.value) == (
        f"{bad.path}: checkpoint and model differ, nothing was replayed: "
        "missing in the checkpoint: decoder.final_layernorm.weight; "
        "unknown to the model: decoder.final_norm.weight; "
        "output_layer.weight has shape [64, 64], the model wants [128, 64]. "
        "Check run_config.yaml against the run, or the snapshot against its source."
    )


def test_devices_that_are_not_there_are_refused(plain_path, monkeypatch):
    monkeypatch.setattr(early, "has_cuda", lambda: False)
    with pytest.raises(UsageError, match="no NVIDIA device is visible here"):
        ReplaySession.open(plain_path, device="cuda")
    with pytest.raises(UsageError, match="expected auto, cpu or cuda"):
        ReplaySession.open(plain_path, device="tpu")
