"""What a replay reads: checked before it reaches a model, packed as the trainer packs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from replay_lib.batch import RankBatch
from replay_lib.engine.inputs import micro_batches, packed_routes, rank_input
from replay_lib.errors import BatchError
from replay_lib.merged import MergedRow

CPU = torch.device("cpu")
V, E, K = 16, 4, 2
MODEL = SimpleNamespace(moe_layers=(True, True), topk=K, experts=E, vocab=V)


TWO_PATHS = MergedRow(path_routes=(torch.zeros(2, 2, K), torch.zeros(2, 2, K)), tree=None)


def batch(layers: int = 2, **columns) -> RankBatch:
    """Two rows of 5 and 3 tokens; the experts of token i in layer l are i + l and i + l + 1."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]).bool()
    loss = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]).bool()
    first = torch.arange(4)[:, None, None] + torch.arange(layers)[None, :, None]
    routes = (torch.cat([first, first + 1], dim=2) % E).to(torch.int16)
    given = {
        "dp_rank": 3,
        "index": torch.tensor([0, 1]),
        "input_ids": torch.arange(12).view(2, 6),
        "labels": torch.where(loss, 1, -100),
        "loss_mask": loss,
        "attention_mask": mask,
        "advantage": torch.zeros(2, 6),
        "routes": (routes, routes[:2]),
    }
    return RankBatch(**(given | columns))


def read(rows: RankBatch, *, model=MODEL, replay=True, loss_tokens_only=False):
    return rank_input(rows, [[0, 1]], model, replay=replay, loss_tokens_only=loss_tokens_only)


def test_packed_routes_follow_their_tokens_and_the_tail_gets_the_placeholder():
    rank = read(batch())
    (micro,) = micro_batches([rank], CPU)
    asked = packed_routes(rank, rank.forced_BTL, micro)
    assert asked.experts.shape == (2, 128, K)
    assert asked.experts[0, :5].tolist() == [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]
    assert asked.experts[1, 5:8].tolist() == [[1, 2], [2, 3], [0, 1]]
    assert (asked.experts[:, 8:] == torch.arange(K)).all()
    assert asked.forced.all()
    assert micro.layout.positions[:8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_run_that_replayed_on_loss_tokens_only_forces_no_others():
    rank = read(batch(), loss_tokens_only=True)
    (micro,) = micro_batches([rank], CPU)
    asked = packed_routes(rank, rank.forced_BTL, micro)
    wanted = [False, True, True, True, False, False, True, False]
    assert asked.forced[:, :8].tolist() == [wanted, wanted]
    assert not asked.forced[:, 8:].any()  # the tail routes itself where some real token does


def test_the_tail_follows_layer_by_layer():
    rank = read(batch())
    (micro,) = micro_batches([rank], CPU)
    forced = rank.forced_BTL.clone()
    forced[:, :, 0] = False
    asked = packed_routes(rank, forced, micro)
    assert not asked.forced[0].any() and asked.forced[1].all()


def test_nothing_forced_is_nothing_asked_for():
    rank = read(batch())
    (micro,) = micro_batches([rank], CPU)
    assert packed_routes(rank, torch.zeros_like(rank.forced_BTL), micro) is None
    assert read(batch(), replay=False).routes_BTLK is None


def test_dense_layers_carry_dummies_that_are_dropped():
    model = SimpleNamespace(moe_layers=(False, True, False, True), topk=K, experts=E, vocab=V)
    rank = read(batch(layers=4), model=model)
    assert rank.routes_BTLK.shape == (2, 6, 2, K)
    assert rank.routes_BTLK[0, 0].tolist() == [[1, 2], [3, 0]]  # layers 1 and 3
    moe_only = read(batch(layers=2), model=model)
    assert moe_only.routes_BTLK[0, 0].tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("value", [V, 500, -3])
def test_a_token_outside_the_embedding_is_named(value):
    ids = torch.arange(12).view(2, 6)
    ids[1, 2] = value
    with pytest.raises(BatchError) as caught:
        read(batch(input_ids=ids))
    assert str(caught.value) == (
        f"batch of dp rank 3: input_ids of row 1 token 2: found {value} (1 such tokens), "
        "expected 0 to 15, the embedding's rows"
    )


def test_a_loss_token_needs_a_label_and_others_do_not():
    labels = batch().labels
    assert int(labels.min()) == -100
    labels[0, 1] = -100
    with pytest.raises(BatchError, match="labels of row 0 token 1: found -100"):
        read(batch(labels=labels))


def test_a_row_without_tokens_is_refused():
    mask = batch().attention_mask
    mask[1] = False
    with pytest.raises(BatchError, match=r"rows \[1\]: found no token at all"):
        read(batch(attention_mask=mask))


@pytest.mark.parametrize("routes", [(), (None, None)])
def test_a_batch_without_any_routes_routes_itself(routes):
    rank = read(batch(routes=routes))
    assert rank.routes_BTLK is None and rank.forced_BTL is None


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"merge_info": (None, TWO_PATHS)}, r"row 1: merge_info: found 2 paths and no tree"),
        ({"routes": (None, batch().routes[1])}, r"rows \[0\] have none; the trainer refuses"),
    ],
)
def test_what_a_flat_replay_cannot_take_is_refused(columns, words):
    with pytest.raises(BatchError, match=words):
        read(batch(**columns))


def test_routes_of_another_number_of_layers_are_refused():
    with pytest.raises(BatchError, match="routes have 3 layers; the model has 2 layers, 2 of them"):
        read(batch(layers=3))
