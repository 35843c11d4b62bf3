"""Ratios and filters: which ratio each reads, and that bounds themselves are kept."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import make_rows

from replay_lib.loss import GrpoSettings
from replay_lib.loss.filters import PolicyFilter, policy_filter
from replay_lib.loss.inputs import read_inputs
from replay_lib.loss.ratios import sequence_ratio, token_ratio

LOG2 = math.log(2)
# old / rollout by token: row 0 is 1/2, 1, 2, (4 off the mask); row 1 is 1
OLD = torch.tensor([[-LOG2, 0.0, LOG2, 2 * LOG2], [0.0, 0.0, 0.0, 0.0]])
MASK = [[1, 1, 1, 0], [1, 1, 1, 1]]


def filtered(log_prob=None, **fields) -> PolicyFilter:
    rows = make_rows(MASK, old_logprobs=OLD, rollout_logprobs=0.0)
    current = torch.zeros(2, 4) if log_prob is None else log_prob
    settings = GrpoSettings(**fields)
    return policy_filter(settings, read_inputs(settings, rows, current, torch.zeros(2, 4)))


def test_log_ratios_are_clamped_at_20_nats_and_carry_no_gradient_beyond():
    log_prob = torch.tensor([30.0, 20.0, -30.0, 1.0], dtype=torch.float64, requires_grad=True)
    ratio = token_ratio(log_prob, torch.zeros(4, dtype=torch.float64))
    ratio.sum().backward()
    e20 = math.exp(20)
    expected = torch.tensor([e20, e20, math.exp(-20), math.e], dtype=torch.float64)
    assert torch.allclose(ratio, expected, rtol=1e-14, atol=0)
    gradient = torch.tensor([0.0, e20, 0.0, math.e], dtype=torch.float64)
    assert torch.allclose(log_prob.grad, gradient, rtol=1e-14, atol=0)


def test_a_sequence_ratio_is_the_geometric_mean_over_loss_tokens():
    mask = torch.tensor(MASK, dtype=torch.bool)
    ratio = sequence_ratio(OLD + 0.5, torch.zeros(2, 4), mask)
    assert ratio.flatten().tolist() == pytest.approx([math.exp(0.5)] * 2)
    none = sequence_ratio(OLD, torch.zeros(2, 4), torch.zeros_like(mask))
    assert none.flatten().tolist() == [1.0, 1.0]


def test_without_filters_everything_is_kept_with_weight_one():
    kept = filtered()
    assert bool(kept.keep_BT.all())
    assert torch.equal(kept.policy_weight_BT, torch.ones(2, 4))


def test_the_cap_bounds_old_over_rollout_from_above_only():
    kept = filtered(mismatch_token_clip_max=1.5)
    assert kept.policy_weight_BT[0].tolist() == pytest.approx([0.5, 1.0, 1.5, 1.0])
    assert kept.capped_BT.tolist() == [[False, False, True, False], [False] * 4]


def test_icepop_drops_strictly_outside():
    assert filtered(icepop_masking_low=0.5, icepop_masking_high=2.0).keep_BT.all()
    kept = filtered(icepop_masking_low=0.51, icepop_masking_high=1.99)
    assert kept.keep_BT.tolist() == [[False, True, False, True], [True] * 4]
    assert kept.policy_weight_BT.tolist() == [[0.0, 1.0, 0.0, 1.0], [1.0] * 4]


def test_the_veto_drops_the_whole_row_below_its_threshold():
    assert filtered(mismatch_token_veto_threshold=0.5).keep_BT.all()
    kept = filtered(mismatch_token_veto_threshold=0.51)
    assert kept.keep_BT.tolist() == [[False] * 4, [True] * 4]


def test_a_veto_above_one_drops_every_row_with_a_masked_position():
    rows = make_rows([[1, 0], [1, 1]], old_logprobs=LOG2, rollout_logprobs=0.0)
    settings = GrpoSettings(mismatch_token_veto_threshold=1.5)
    inputs = read_inputs(settings, rows, torch.zeros(2, 2), torch.zeros(2, 2))
    assert policy_filter(settings, inputs).veto_B1.flatten().tolist() == [False, True]


def test_the_sequence_mask_reads_current_over_rollout_not_old():
    bounds = {"mismatch_seq_masking_low": 0.9, "mismatch_seq_masking_high": 1.1}
    assert filtered(**bounds).keep_BT.all()
    current = torch.tensor([[0.2] * 4, [-0.2] * 4])
    assert not filtered(current, **bounds).keep_BT.any()
    assert filtered(current, mismatch_seq_masking_low=0.9).keep_BT[:, 0].tolist() == [True, False]
    assert filtered(current, mismatch_seq_masking_high=1.1).keep_BT[:, 0].tolist() == [False, True]


def test_filters_carry_no_gradient():
    current = torch.zeros(2, 4, requires_grad=True)
    kept = filtered(current, mismatch_seq_masking_low=0.9, mismatch_token_clip_max=2.0)
    assert not kept.policy_weight_BT.requires_grad


def test_a_sequence_exactly_at_its_bounds_is_kept():
    assert filtered(mismatch_seq_masking_low=1.0, mismatch_seq_masking_high=1.0).keep_BT.all()


def test_a_row_of_one_token_has_that_tokens_ratio():
    mask = torch.tensor([[False, True]])
    ratio = sequence_ratio(torch.tensor([[9.0, 0.5]]), torch.zeros(1, 2), mask)
    assert float(ratio) == pytest.approx(math.exp(0.5))


def test_sequence_ratios_are_clamped_token_by_token():
    # 50 and -20: clamped to 20 and -20 before the mean
    ratio = sequence_ratio(
        torch.tensor([[50.0, -20.0]]), torch.zeros(1, 2), torch.ones(1, 2).bool()
    )
    assert float(ratio) == 1.0
