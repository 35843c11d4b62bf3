"""Merged and unmerged replays of the same step, through the real engine, beside the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_against_reference import FLOAT32, oracle, unstacked
from tree_shapes import FOREST, ONE_BRANCH, PREFIX, SINGLE, TWICE, merged_batch

from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.patch import Seam
from replay_lib.snapshot import open_snapshot, read_content, write_snapshot

pytestmark = pytest.mark.xdist_group("engine-merged")

SNAPSHOT = Path(__file__).parents[1] / "data" / "snap" / "merged" / "iter_0000085"
#: Float32: the same sums in another order. What was seen is 7e-8, a parameter's 4e-7.
SAME = 1e-5
UNMERGED = "disable-merged-forward"
#: Seams of the routes and of the loss, what a sequence is among them.
METHODS = (
    "baseline",
    "use-current-routing-for-first-moe-layer",
    "replay-r3-on-loss-tokens-only",
    "use-sequence-mean-aggregation",
    "disable-routing-replay",
)


@pytest.fixture(scope="module")
def merged() -> Iterator[ReplaySession]:
    with ReplaySession.open(SNAPSHOT, device="cpu") as session:
        yield session


def pairs(session: ReplaySession, other: str) -> list[tuple[Outcome, Outcome]]:
    """Each method by itself and with ``other``, in one session."""
    beside = [other if m == "baseline" else f"{m}+{other}" for m in METHODS]
    outcomes = list(session.run_many([Experiment.parse(text) for text in (*METHODS, *beside)]))
    return list(zip(outcomes[: len(METHODS)], outcomes[len(METHODS) :], strict=True))


def assert_same(one: Outcome, other: Outcome) -> None:
    """Norm, every parameter's norm, loss and denominator."""
    assert one.denominator == other.denominator > 0
    assert one.loss == pytest.approx(other.loss, rel=SAME)
    assert one.grad_norm_preclip == pytest.approx(other.grad_norm_preclip, rel=SAME)
    assert set(one.param_norms) == set(other.param_norms)
    for name, norm in one.param_norms.items():
        assert norm == pytest.approx(other.param_norms[name], rel=SAME), name
    assert one.nonfinite == other.nonfinite == ()


def test_merged_and_unmerged_agree_under_every_kind_of_method(merged):
    norms = []
    for together, apart in pairs(merged, UNMERGED):
        assert_same(together, apart)
        assert apart.touched[Seam.ROWS] == 3  # one row of the four is padding, a single path
        assert together.digest != apart.digest  # another order of sums, so it was another replay
        norms.append(together.grad_norm_preclip)
    assert len(set(norms)) == len(METHODS)  # each method does something here


RANKS = ("baseline", "disable-routing-replay", UNMERGED, "seam_examples:scaled_router")


@pytest.fixture(scope="module")
def one_rank(merged) -> list[Outcome]:
    return list(merged.run_many([Experiment.parse(text) for text in RANKS]))


@pytest.mark.parametrize(
    "layout",
    [
        "ep=2",
        "pp=2",
        pytest.param("tp=2", marks=pytest.mark.slow),
        pytest.param("cp=2", marks=pytest.mark.slow),
        pytest.param("dp=2", marks=pytest.mark.slow),
        pytest.param("pp=2,ep=2", marks=pytest.mark.slow),
    ],
)
def test_several_ranks_give_the_figures_of_one(one_rank, layout):
    with ReplaySession.open(SNAPSHOT, device="cpu", layout=layout) as session:
        assert session.info.fidelity == ("full" if layout == "dp=2" else "folded")
        outcomes = list(session.run_many([Experiment.parse(text) for text in RANKS]))
        assert session.run(Experiment.baseline()).digest == outcomes[0].digest
    for outcome, expected in zip(outcomes, one_rank, strict=True):
        assert_same(outcome, expected)
        assert outcome.touched == expected.touched
    assert len({outcome.digest for outcome in outcomes}) == len(RANKS)


def note_of(session: ReplaySession) -> str:
    (note,) = [n for n in session.info.notes if "rows are prefix trees" in n]
    return note


def test_the_session_says_what_its_recorded_norm_is_worth(merged):
    note = note_of(merged)
    assert note.startswith(
        "3 rows are prefix trees of several paths (merge_info), replayed as trees"
    )
    assert "a reference only where the run took it on these merged rows" in note
    assert merged.info.fidelity == "folded"


@pytest.mark.parametrize("experiment", ["baseline", UNMERGED])
def test_both_have_the_gradient_of_the_oracle(merged, tmp_path, experiment):
    file = tmp_path / "gradients.pt"
    merged.save_gradients(Experiment.parse(experiment), file)
    engine = torch.load(file, weights_only=True)
    reference = unstacked(oracle(SNAPSHOT, replayed=True).gradients)
    assert set(engine) == set(reference)
    for name, expected in reference.items():
        off = float((engine[name].double() - expected).abs().max() / expected.abs().max())
        assert off <= FLOAT32, name


MERGE = """
from replay_lib.patch import mitigation, rows_patch


@mitigation(slug="merge", family="rows", summary="Trees.", source="this test")
def merge():
    return rows_patch("merged")
"""


def test_hand_made_trees_in_a_session_that_unmerges(tmp_path):
    """Branches twice, a path that another goes on from, one trained branch, two roots."""
    content = read_content(open_snapshot(SNAPSHOT))
    options = {"vocab": 128, "layers": 4, "experts": 8, "topk": 2, "width": 64}
    batches = (
        merged_batch([TWICE, SINGLE, PREFIX], **options, seed=1),
        merged_batch([FOREST, ONE_BRANCH, TWICE], **options, seed=2, dp_rank=1),
    )
    path = tmp_path / "iter_0000085"
    write_snapshot(path, dataclasses.replace(content, batches=batches, grad_info={}))
    methods = tmp_path / "methods"
    methods.mkdir()
    (methods / "merge.py").write_text(MERGE)
    options = {"rows": "unmerged", "mitigations": [methods], "layout": "dp=2"}
    with ReplaySession.open(path, device="cpu", **options) as session:
        assert "replayed one row a path" in note_of(session)
        assert session.info.fidelity == "folded"  # on the recorded layout, but in another order
        outcomes = pairs(session, "merge")
    for apart, together in outcomes:
        assert_same(apart, together)
        assert together.touched[Seam.ROWS] == 5
    baseline = outcomes[0][0]
    reference = oracle(path, replayed=True)
    assert baseline.grad_norm_preclip == pytest.approx(reference.grad_norm_preclip, rel=SAME)
