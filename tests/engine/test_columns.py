"""Columns that experiments of one forward share on the device, and those that they may not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_inputs import CPU, batch

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.engine.apply import apply_patches
from replay_lib.engine.columns import apart, rows_on_device
from replay_lib.engine.step import _loss_rows
from replay_lib.loss import GrpoSettings
from replay_lib.patch import batch_patch
from replay_lib.trainers.protocol import BUILT_IN

NAMES = TOKEN_COLUMNS + ROW_COLUMNS
ROWS = (1, 0)


@pytest.fixture
def own() -> RankBatch:
    return batch(old_logprobs=torch.tensor([[0.0, -0.5, -1, -2, 0, 0], [0, -0.25, 0, 0, 0, 0]]))


def patched(own: RankBatch, change) -> RankBatch:
    """What a batch patch makes of ``own`` in the engine."""
    rank = SimpleNamespace(batch=own, forced_BTL=None, trees=())
    (made,) = apply_patches([batch_patch(change)], [rank], GrpoSettings()).batches
    return made


def taken(one: RankBatch, own: RankBatch, shared: dict) -> RankBatch:
    """Its rows on the device, which have to be those that plain selecting gives."""
    rows = rows_on_device(one, own, ROWS, shared, CPU)
    plain = one.select(ROWS)
    for name in NAMES:
        found, wanted = getattr(rows, name), getattr(plain, name)
        assert found is wanted is None or torch.equal(found, wanted), name
    assert all(a is b for a, b in zip(rows.routes, plain.routes, strict=True))
    return rows


def same(one: RankBatch, other: RankBatch) -> set[str]:
    """Columns that are one tensor in both."""
    there = [name for name in NAMES if getattr(one, name) is not None]
    return {name for name in there if getattr(one, name) is getattr(other, name)}


def test_unpatched_columns_are_copied_once(own: RankBatch) -> None:
    shared: dict = {}
    first, second = taken(own, own, shared), taken(own, own, shared)
    assert same(first, second) == set(shared) == {n for n in NAMES if getattr(own, n) is not None}


def test_a_patch_keeps_what_it_changed_and_shares_the_rest(own: RankBatch) -> None:
    shared: dict = {}
    plain = taken(own, own, shared)
    more = patched(own, lambda b: b.replace(advantage=b.advantage + 1, reward=torch.ones(2)))
    rows = taken(more, own, shared)
    assert same(plain, rows) == set(shared) - {"advantage"}
    assert float(rows.advantage.min()) == float(rows.reward.min()) == 1
    less = taken(patched(own, lambda b: b.replace(old_logprobs=None)), own, shared)
    assert less.old_logprobs is None
    assert torch.equal(taken(own, own, shared).advantage, own.advantage[list(ROWS)])


def test_a_patch_that_writes_into_its_copy_is_seen(own: RankBatch) -> None:
    def writes(given: RankBatch) -> RankBatch:
        given.advantage[0, 0] = 7
        return given

    shared: dict = {}
    plain, rows = taken(own, own, shared), taken(patched(own, writes), own, shared)
    assert rows.advantage[1, 0] == 7 and plain.advantage[1, 0] == 0


def test_bits_count_where_values_are_equal(own: RankBatch) -> None:
    negative = patched(own, lambda b: b.replace(advantage=-b.advantage))
    assert negative.advantage is not own.advantage and torch.equal(
        negative.advantage, own.advantage
    )
    nans = batch(advantage=torch.full((2, 6), torch.nan))
    assert patched(nans, lambda b: b).advantage is nans.advantage


def test_the_order_in_which_they_ask_does_not_matter(own: RankBatch) -> None:
    shared: dict = {}
    changed = patched(own, lambda b: b.replace(advantage=b.advantage + 1))
    taken(changed, own, shared)
    assert "advantage" not in shared
    assert torch.equal(taken(own, own, shared).advantage, own.advantage[list(ROWS)])


def test_columns_of_ones_own_can_be_written_into(own: RankBatch) -> None:
    shared: dict = {}
    rows = taken(own, own, shared)
    mine = apart(rows)
    assert same(mine, rows) == set()
    mine.advantage.fill_(9)
    assert torch.equal(taken(own, own, shared).advantage, own.advantage[list(ROWS)])


@pytest.mark.parametrize("trainer", [BUILT_IN, replace(BUILT_IN, name="my.losses:make")])
def test_only_the_built_in_loss_reads_what_experiments_share(own: RankBatch, trainer) -> None:
    shared: dict = {}
    loaded = SimpleNamespace(trainer=trainer, ranks=[SimpleNamespace(batch=own)])
    variant = SimpleNamespace(patched=SimpleNamespace(batches=(own,)), carried_from=None)
    micro = SimpleNamespace(rank=0, rows=ROWS)
    rows = _loss_rows(loaded, micro, variant, torch.zeros(2, 6), shared)
    other = _loss_rows(loaded, micro, variant, torch.zeros(2, 6), shared)
    assert same(rows, other) == (set(shared) if trainer is BUILT_IN else set())
