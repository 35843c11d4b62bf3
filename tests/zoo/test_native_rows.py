"""Rows divided over data-parallel ranks, and packed for tensor- and context-parallel ones."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from tiny_zoo import FakeRun

from replay_lib.zoo.native.divide import divide
from replay_lib.zoo.native.packing import packed, places, unpacked


@pytest.fixture(scope="module")
def batch():
    run = FakeRun()
    return run.ordinary(run.roll(run.sampler()))


def test_rows_go_round_the_ranks_and_none_is_lost(batch):
    ranks = divide([batch], 4, seed=7, padding_length=4)
    assert [b.dp_rank for b in ranks] == [0, 1, 2, 3]
    assert [b.rows for b in ranks] == [3, 3, 3, 3]
    found = sorted(chain.from_iterable(b.input_ids.tolist() for b in ranks))
    assert found == sorted(batch.input_ids.tolist())


def test_each_row_keeps_its_own_columns_and_routes(batch):
    ranks = divide([batch], 2, seed=7, padding_length=4)
    where = {tuple(row): i for i, row in enumerate(batch.input_ids.tolist())}
    for part in ranks:
        for row in range(part.rows):
            old = where[tuple(part.input_ids[row].tolist())]
            assert torch.equal(part.advantage[row], batch.advantage[old])
            assert torch.equal(part.routes[row], batch.routes[old])


def test_the_order_is_the_seeds(batch):
    def order(seed):
        return [b.input_ids.tolist() for b in divide([batch], 2, seed=seed, padding_length=4)]

    assert order(7) == order(7) != order(8)


def test_padding_rows_fill_up_and_train_nothing(batch):
    ranks = divide([batch], 5, seed=7, padding_length=4)
    assert {b.rows for b in ranks} == {3}
    rows = [(b, r) for b in ranks for r in range(b.rows) if b.index[r] == -1]
    assert len(rows) == 3
    for part, row in rows:
        assert part.lengths()[row] == 4
        assert not part.loss_mask[row].any() and not part.advantage[row].any()
        assert bool((part.labels[row] == -100).all())
        assert part.routes[row].tolist() == [[[0, 1]] * 2] * 3


def test_batches_of_several_ranks_become_one_again(batch):
    parts = divide([batch], 3, seed=1, padding_length=4)
    (whole,) = divide(parts, 1, seed=2, padding_length=4)
    assert sorted(whole.input_ids.tolist()) == sorted(batch.input_ids.tolist())


def test_without_a_split_rows_follow_each_other_up_to_a_multiple_of_128():
    where = places([5, 9], tp=1, cp=1, cp_rank=0)
    assert where.starts == (0, 5, 128)
    assert where.mine.tolist() == list(range(128))


def test_tensor_parallel_ranks_need_rows_of_their_multiple():
    assert places([5, 9], tp=2, cp=1, cp_rank=0).starts == (0, 6, 256)


def test_context_parallel_ranks_have_an_early_and_a_late_chunk_of_each_row():
    first, second = (places([5, 9], tp=1, cp=2, cp_rank=rank) for rank in (0, 1))
    assert first.starts == (0, 8, 256)
    assert first.mine[:4].tolist() == [0, 1, 6, 7]
    assert second.mine[:4].tolist() == [2, 3, 4, 5]
    half = (256 - 8) // 4
    assert first.mine[4:6].tolist() == [8, 9] and first.mine[-1] == 255
    assert second.mine[4] == 8 + half
    both = torch.cat([first.mine, second.mine])
    assert sorted(both.tolist()) == list(range(256))


def test_what_was_packed_comes_back():
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    values = torch.arange(10.0).view(2, 5)
    where = places([3, 5], tp=1, cp=1, cp_rank=0)
    own = packed(values, mask, where).requires_grad_()
    back = unpacked(own, mask, where, None)
    assert torch.equal(back, torch.where(mask, values, 0.0))
    back.sum().backward()
    assert own.grad.sum() == 8


def test_padding_of_experts_is_the_placeholder():
    mask = torch.ones(1, 3, dtype=torch.bool)
    experts = torch.full((1, 3, 2, 2), 5, dtype=torch.int16)
    where = places([3], tp=1, cp=1, cp_rank=0)
    made = packed(experts, mask, where, torch.arange(2))
    assert made.shape == (128, 2, 2) and made.dtype == torch.int16
    assert made[3:].unique(dim=0).tolist() == [[[0, 1], [0, 1]]]
