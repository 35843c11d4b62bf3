"""Sign balance of advantages, by hand; the published code block is compared in test_golden."""

from __future__ import annotations

import pytest
import torch

from replay_lib.batch import RankBatch
from replay_lib.errors import PatchError
from replay_lib.methods import load_methods
from replay_lib.patch import Seam


def balance(advantage, loss_mask, **params) -> torch.Tensor:
    advantage_BT = torch.tensor(advantage, dtype=torch.float32)
    ids = torch.zeros(advantage_BT.shape, dtype=torch.int64)
    mask_BT = torch.tensor(loss_mask, dtype=torch.bool).reshape(advantage_BT.shape)
    batch = RankBatch(
        dp_rank=0,
        index=torch.arange(len(ids)),
        input_ids=ids,
        labels=ids,
        loss_mask=mask_BT,
        attention_mask=torch.ones_like(mask_BT),
        advantage=advantage_BT,
    )
    (patch,) = load_methods()["balance-negative-advantages"].patches(params)
    assert patch.seam is Seam.BATCH
    before = advantage_BT.clone()
    result = patch.apply(batch)
    same = torch.equal(batch.advantage.nan_to_num(9.0), before.nan_to_num(9.0))
    assert same, "a patch must not change what it was given"
    assert result.advantage.dtype == torch.float32
    return result.advantage


def test_dominating_negatives_are_scaled_down_at_masked_positions_too():
    # loss tokens: P = 1 + 0.5, N = 2 + 4, s = 0.25; the masked -8 does not count but is scaled
    result = balance([[1.0, -2.0, -8.0], [0.5, -4.0, 3.0]], [[1, 1, 0], [1, 1, 0]])
    assert result.tolist() == [[1.0, -0.5, -2.0], [0.5, -1.0, 3.0]]


def test_sums_are_taken_over_the_whole_rank_not_row_by_row():
    # row 1 alone is balanced; s = (1 + 1) / (1 + 3) acts on both rows
    result = balance([[1.0, -1.0], [1.0, -3.0]], [[1, 1], [1, 1]])
    assert result.tolist() == [[1.0, -0.5], [1.0, -1.5]]


def test_negatives_are_never_scaled_up_unless_asked():
    advantage, mask = [[4.0, -1.0]], [[1, 1]]
    assert balance(advantage, mask).tolist() == [[4.0, -1.0]]
    assert balance(advantage, mask, scale_up=True).tolist() == [[4.0, -4.0]]


@pytest.mark.parametrize("advantage", [[[-1.0, -2.0]], [[1.0, 2.0]], [[0.0, 0.0]]])
def test_without_both_signs_nothing_changes(advantage):
    assert balance(advantage, [[1, 1]], scale_up=True).tolist() == advantage


def test_values_at_eps_count_neither_way():
    # strict comparison: eps itself is no positive, -eps no negative
    result = balance([[0.5, -0.5, 1.0, -2.0]], [[1, 1, 1, 1]], eps=0.5)
    assert result.tolist() == [[0.5, -0.5, 1.0, -1.0]]


def test_a_nan_stays_a_nan_and_moves_nothing_else():
    result = balance([[float("nan"), 1.0, -2.0]], [[1, 1, 1]])
    assert result[0, 0].isnan()
    assert result[0, 1:].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("eps", [-1.0, -1e-9])
def test_a_negative_eps_is_refused(eps):
    method = load_methods()["balance-negative-advantages"]
    with pytest.raises(PatchError, match=r"found eps=.*, expected >= 0"):
        method.patches({"eps": eps})
