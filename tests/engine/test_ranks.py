"""Replays on several ranks give the one-rank replay's figures, seam by seam."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from odd_model import write_odd_snapshot

from replay_lib.engine import session as session_module
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import EngineError, SnapshotError, UnsupportedModelError, UsageError

BASELINE = Experiment.baseline()
#: One method at each seam, and settings that need entropies.
NAMES = (
    "baseline",
    "seam_examples:scaled_router",
    "seam_examples:scaled_topk",
    "seam_examples:even_rows_replay",
    "seam_examples:half_sure_replay",
    "seam_examples:smaller_advantage",
    "seam_examples:sequence_mean",
    "seam_examples:weighted_tokens",
    "seam_examples:entropy_of_few:top_k=7",
)
#: float32 sums in another order: 5e-8 of the norm and 5e-7 of a parameter's own were seen, on
#: 10 layouts and both Megatron versions
NORM, OWN = 1e-6, 5e-6
#: what is left of a parameter whose gradient is nearly nothing, as a share of the whole norm
REST = 1e-7
TWO_RANKS = ("tp=2,ep=2", "pp=2", "cp=2")
MORE = ("dp=2", "ep=2", "tp=2", "cp=2,ep=2", "tp=2,pp=2", "tp=2,ep=4,dp=2", "pp=2,cp=2")


def assert_same(outcome, expected) -> None:
    """Figures of one replay against those of another layout."""
    name = expected.experiment.name
    assert outcome.grad_norm_preclip == pytest.approx(expected.grad_norm_preclip, rel=NORM), name
    if expected.grad_norm_preclip_carried is not None:
        carried = expected.grad_norm_preclip_carried
        assert outcome.grad_norm_preclip_carried == pytest.approx(carried, rel=NORM), name
    assert set(outcome.param_norms) == set(expected.param_norms)
    bound = REST * expected.grad_norm_preclip
    for key, norm in expected.param_norms.items():
        assert outcome.param_norms[key] == pytest.approx(norm, rel=OWN, abs=bound), (name, key)
    assert (outcome.touched, outcome.denominator) == (expected.touched, expected.denominator)
    assert outcome.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)
    for told, wanted in (
        (outcome.cosine, expected.cosine),
        (outcome.cosine_carried, expected.cosine_carried),
    ):
        assert (told is None) == (wanted is None), name
        assert told is None or told == pytest.approx(wanted, abs=1e-6), name
    if expected.retained is not None:
        for kind, share in expected.retained.model_dump().items():
            assert getattr(outcome.retained, kind) == pytest.approx(share, abs=1e-6), (name, kind)


def compare(session: ReplaySession, expected: list, names=NAMES) -> None:
    """Every experiment on ``session``, and its first one again."""
    outcomes = list(session.run_many([Experiment.parse(name) for name in names]))
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert_same(outcome, wanted)
    assert session.run(BASELINE).digest == outcomes[0].digest
    assert len({outcome.digest for outcome in outcomes}) == len(outcomes)


@pytest.fixture(scope="module")
def expected(plain):
    return list(plain.run_many([Experiment.parse(name) for name in NAMES]))


@pytest.fixture(scope="module")
def whole(plain, tmp_path_factory):
    path = tmp_path_factory.mktemp("gradients") / "one.pt"
    plain.save_gradients(BASELINE, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks_give_the_same_figures_and_whole_gradients(
    plain_path, expected, whole, layout, tmp_path
):
    with ReplaySession.open(plain_path, device="cpu", layout=layout) as session:
        assert session.info.fidelity == "folded"
        assert session.info.parameters == 264896  # each counted once
        compare(session, expected)
        session.save_gradients(BASELINE, tmp_path / "two.pt")
        broken = session.run(Experiment.parse("seam_examples:nan_advantage"))
        assert broken.nonfinite[0].startswith("dLoss/dlogprob of dp rank 0 row ")
    saved = torch.load(tmp_path / "two.pt", weights_only=True)
    assert set(saved) == set(whole)
    for name, gradient in whole.items():
        # float32 sums in another order, on the scale of the parameter's largest gradient
        torch.testing.assert_close(
            saved[name], gradient, rtol=0, atol=5e-6 * float(gradient.abs().max())
        )


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE)
def test_more_layouts_give_the_same_figures(plain_path, expected, layout):
    with ReplaySession.open(plain_path, device="cpu", layout=layout) as session:
        assert session.info.fidelity == ("full" if layout == "dp=2" else "folded")
        compare(session, expected)


ODD_NAMES = ("baseline", "seam_examples:scaled_router", "seam_examples:smaller_advantage")


@pytest.fixture(scope="module")
def odd(tmp_path_factory, plain_path):
    return write_odd_snapshot(tmp_path_factory.mktemp("odd"), plain_path)


@pytest.fixture(scope="module")
def odd_expected(odd):
    with ReplaySession.open(odd, device="cpu", layout="dp=1") as session:
        return list(session.run_many([Experiment.parse(name) for name in ODD_NAMES]))


@pytest.mark.parametrize(
    "layout",
    [
        "ep=2,dp=2",  # three recorded ranks on two: one has steps in which it only serves the other
        pytest.param("pp=2", marks=pytest.mark.slow),  # the tied embedding lives on both stages
        pytest.param("tp=2", marks=pytest.mark.slow),  # so do shared experts and biases
        pytest.param("cp=2", marks=pytest.mark.slow),
        pytest.param("tp=2,pp=2,ep=2", marks=pytest.mark.slow),
    ],
)
def test_tied_dense_shared_and_unequal_parts_come_out_the_same(odd, odd_expected, layout):
    with ReplaySession.open(odd, device="cpu", layout=layout) as session:
        compare(session, odd_expected, ODD_NAMES)


def test_what_a_layout_cannot_do_is_told_before_any_process_starts(plain_path, monkeypatch):
    monkeypatch.setattr(session_module, "WorkerJob", None)
    with pytest.raises(UnsupportedModelError, match="num_layers is 4, which pp=3 does not divide"):
        ReplaySession.open(plain_path, device="cpu", layout="pp=3")
    with pytest.raises(UsageError, match="found dp=3 for 2 data-parallel ranks to replay"):
        ReplaySession.open(plain_path, device="cpu", layout="dp=3")


def ranks_of(session: ReplaySession) -> list[psutil.Process]:
    """The job's processes in rank order."""
    children = psutil.Process(session._worker.process.pid).children()
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def test_a_killed_rank_is_one_error_that_names_it(plain_path):
    with ReplaySession.open(plain_path, device="cpu", layout="ep=2") as session:
        ranks = ranks_of(session)
        os.kill(ranks[1].pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineError) as caught:
            session.run(BASELINE)
        assert time.monotonic() - start <= 60
    assert str(caught.value).startswith("the worker's rank 1 was ended by SIGKILL")
    assert "Traceback" not in str(caught.value)
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("code", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_a_rank_that_ends_itself_is_named_with_its_exit_code(plain_path, code):
    with ReplaySession.open(plain_path, device="cpu", layout="dp=2") as session:
        start = time.monotonic()
        with pytest.raises(EngineError) as caught:
            session.run(Experiment.parse(f"rank_examples:leaves:code={code}"))
        assert time.monotonic() - start <= 60
    assert str(caught.value).startswith(
        f"the worker's rank 1 ended itself with exit code {code}: os._exit was called in apply ("
    )
    assert "rank_examples.py, line " in str(caught.value)


def test_weights_that_only_the_second_stage_reads_end_both_with_one_error(plain_path, tmp_path):
    broken = tmp_path / plain_path.name
    shutil.copytree(plain_path, broken)
    corrupt_output_layer(broken)
    start = time.monotonic()
    with pytest.raises(SnapshotError) as caught:
        ReplaySession.open(broken, device="cpu", layout="pp=2")
    assert time.monotonic() - start <= 60
    assert "output_layer.weight" in str(caught.value) or ".distcp" in str(caught.value)


def corrupt_output_layer(snapshot: Path) -> None:
    """Overwrite the bytes of the output layer, which pipeline stage 1 alone reads."""
    from replay_lib.snapshot.checkpoint import SafeReader

    index = SafeReader(snapshot).read_metadata()
    places = [info for at, info in index.storage_data.items() if at.fqn == "output_layer.weight"]
    assert places
    for place in places:
        with (snapshot / place.relative_path).open("r+b") as file:
            file.seek(place.offset)
            file.write(b"\0" * place.length)
