"""Patches on several ranks: what they make is compared, a bad one ends its experiment only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import PatchError, SpikeReplayError

pytestmark = pytest.mark.xdist_group("engine-agreement")

BASELINE = Experiment.baseline()
PURE = (
    "Make it pure: the same on every rank. Draw from a generator that the batch seeds "
    "(batch.dp_rank, batch.index), never from the process's own random state, its id, the clock "
    "or its environment"
)
BOTH = "expected the same on ranks 0, 1, which share it"
#: By method: the seam, and what is another one on rank 1.
IMPURE = {
    "impure_batch": "batch seam: found another advantage of dp rank 0",
    "impure_routing": "routing seam: found another mask of dp rank 0",
    "impure_settings": "settings seam: found another mismatch_token_clip_max",
    "impure_model": "model seam: found another moe_router_topk_scaling_factor",
    "impure_token_weights": "token_weights seam: found another weights of dp rank 0",
    "impure_weights": "weights seam: found another decoder.layers.0.mlp.router.weight",
    "impure_rows": "rows seam: found another packing",
    "impure_seams": "its patches: found another list of seams",
}
#: What a bad patch is called where one rank met it, and where both did.
BAD = {
    "rank_examples:failing_batch": (
        "a patch at the batch seam raised LookupError: not on this rank (met on rank 1 of 2 alone)"
    ),
    "rank_examples:failing_batch:rank=0": (
        "a patch at the batch seam raised LookupError: not on this rank (met on rank 0 of 2 alone)"
    ),
    "rank_examples:failing_weights": (
        "a patch at the weights seam raised LookupError: not on this rank "
        "(met on rank 1 of 2 alone)"
    ),
    "rank_examples:failing_token_weights": (
        "a patch at the token_weights seam raised LookupError: not on this rank "
        "(met on rank 1 of 2 alone)"
    ),
    "rank_examples:fails_to_build_on_rank_1": (
        "mitigation rank_examples:fails_to_build_on_rank_1: its function raised IndexError: "
        "list index out of range (met on rank 1 of 2 alone)"
    ),
    "rank_examples:token_mask": (
        "a token-weights patch must return real numbers on cpu, not bool on cpu"
    ),
    "rank_examples:no_routes": (
        "a batch patch changed routes; where saved routes are forced is the routing seam's "
        "business, and other routes are another step"
    ),
    "seam_examples:raising": (
        "a patch at the batch seam raised TypeError: unsupported operand type(s) for /: "
        "'Tensor' and 'NoneType'"
    ),
    "seam_examples:impossible_groups": (
        "the model cannot run with the fields of a model patch: RuntimeError: "
        "shape '[16, 3, -1]' is invalid for input of size 128"
    ),
    "seam_examples:no_parameters": ("a weights patch must return a dict of tensors, not NoneType"),
}
SOUND = (
    "seam_examples:scaled_router",
    "seam_examples:scaled_topk",
    "seam_examples:even_rows_replay",
    "seam_examples:smaller_advantage+seam_examples:weighted_tokens",
)


@pytest.fixture(scope="module")
def split(plain_path) -> Iterator[ReplaySession]:
    with ReplaySession.open(plain_path, device="cpu", layout="tp=2") as session:
        yield session


@pytest.fixture(scope="module")
def digest(split) -> str:
    return split.run(BASELINE).digest


def told_of(session: ReplaySession, name: str) -> SpikeReplayError:
    with pytest.raises(SpikeReplayError) as caught:
        session.run(Experiment.parse(name))
    return caught.value


@pytest.mark.parametrize("name", IMPURE)
def test_a_patch_that_is_another_one_on_another_rank_is_named(split, digest, name):
    error = told_of(split, f"rank_examples:{name}")
    assert type(error) is PatchError
    text = f"mitigation rank_examples:{name}: {IMPURE[name]} on rank 1 than on rank 0, {BOTH}. "
    shards = (
        ", and of weights use each element or expert by itself, since under tp, pp and ep a rank "
        "has a part of the model"
    )
    assert str(error) == text + PURE + (shards if name == "impure_weights" else "") + "."
    assert split.run(BASELINE).digest == digest


@pytest.mark.parametrize("name", BAD)
def test_a_bad_patch_ends_its_experiment_and_not_the_session(split, digest, name):
    error = told_of(split, name)
    assert type(error) is PatchError
    assert str(error) == BAD[name]
    assert split.run(BASELINE).digest == digest


def test_the_method_at_fault_is_named_among_several(split):
    error = told_of(split, "seam_examples:sequence_mean+rank_examples:impure_batch")
    assert str(error).startswith("mitigation rank_examples:impure_batch: batch seam: found")


def test_what_a_bad_one_is_asked_for_with_is_told_too(split, digest, tmp_path):
    asked = [BASELINE, Experiment.parse("rank_examples:failing_batch")]
    with pytest.raises(PatchError, match="met on rank 1 of 2 alone"):
        list(split.run_many(asked))
    with pytest.raises(PatchError, match="met on rank 1 of 2 alone"):
        split.save_gradients(asked[1], tmp_path / "never.pt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(PatchError, match="another advantage"):
        split.run(Experiment.parse("baseline", against="rank_examples:impure_batch"))
    assert split.run(BASELINE).digest == digest


def test_what_is_the_same_on_all_ranks_is_replayed(split, digest):
    outcomes = list(split.run_many([Experiment.parse(name) for name in SOUND]))
    assert len({outcome.digest for outcome in outcomes} | {digest}) == len(SOUND) + 1
