"""Policy losses token by token, against formulas by hand."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import make_rows, random_rows

from replay_lib.loss import GrpoSettings
from replay_lib.loss.inputs import read_inputs
from replay_lib.loss.policy import policy_term

LOW, HIGH = 0.8, 1.28


def term(ratio, advantage, loss_type, log_prob=-1.0, **fields):
    """Loss and gradient of one token with this ratio to its base."""
    current = torch.tensor([[log_prob]], dtype=torch.float64, requires_grad=True)
    base = log_prob - math.log(ratio)
    column = torch.tensor([[base]], dtype=torch.float64)
    rows = make_rows(
        [[1]],
        advantage=advantage,
        old_logprobs=column,
        rollout_logprobs=column,
    )
    settings = GrpoSettings(loss_type=loss_type, **fields)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    result = policy_term(settings, read_inputs(settings, rows, current, zero))
    result.loss_BT.sum().backward()
    return float(result.loss_BT.detach()), float(current.grad)


def close(found, expected):
    # log and exp of the ratio: a few units in the last place of float64
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (1.5, 2.0, -2 * HIGH, 0.0),  # already encouraged enough
        (0.5, 2.0, -1.0, -1.0),  # below: pessimistic bound keeps the ratio
        (0.5, -2.0, 2 * LOW, 0.0),  # already discouraged enough
        (2.0, -2.0, 4.0, 4.0),  # above, under the dual clip
        (5.0, -2.0, 6.0, 0.0),  # dual clip at 3
        (5.0, -0.5, 1.5, 0.0),  # for a small cost too
        (1.1, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("loss_type", ["grpo", "ppo"])
def test_ppos_surrogate_with_dual_clip(loss_type, ratio, advantage, loss, gradient):
    close(term(ratio, advantage, loss_type), (loss, gradient))


def test_dual_clip_can_be_off():
    close(term(5.0, -2.0, "grpo", dual_clip_neg_adv_factor=None), (10.0, 10.0))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.5, LOW), (1.1, 1.1), (1.5, HIGH)])
def test_tis_clips_the_weight_and_keeps_the_gradient(advantage, ratio, weight):
    close(term(ratio, advantage, "tis", -3.0), (3 * advantage * weight, -advantage * weight))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.5, LOW), (1.1, 1.1), (1.5, HIGH)])
def test_kimi_stops_the_gradient_where_it_clips(advantage, ratio, weight):
    gradient = -advantage * weight if ratio == 1.1 else 0.0
    fields = {"is_base_logprobs": "rollout_logprobs"}
    close(term(ratio, advantage, "kimi2_5", -3.0, **fields), (3 * advantage * weight, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(5.0, 2.0, 1.0), (0.1, 2.0, 1.0), (5.0, 0.0, 1.0), (5.0, -2.0, 1.0), (0.1, -2.0, 0.1)],
)
def test_topr_weighs_gains_by_one_and_costs_by_at_most_one(ratio, advantage, weight):
    close(term(ratio, advantage, "topr", -3.0), (3 * advantage * weight, -advantage * weight))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "stopped"),
    [
        (1.1, 2.0, 1.1, False),
        (1.5, 2.0, HIGH, True),
        (1.0, 2.0, 1.0, False),
        (0.1, 2.0, 0.1, False),
        (2.0, -2.0, 2.0, False),
        (5.0, -2.0, 3.0, False),
        (0.9, -2.0, 0.9, False),
        (0.1, -2.0, LOW, True),
    ],
)
def test_grpo2_by_its_table(ratio, advantage, weight, stopped):
    gradient = 0.0 if stopped else -advantage * weight
    close(term(ratio, advantage, "grpo2", -3.0), (3 * advantage * weight, gradient))


def test_gspo_gives_all_tokens_of_a_row_one_ratio_and_one_gradient():
    current = torch.tensor([[-1.0, -2.0, -9.0]], dtype=torch.float64, requires_grad=True)
    rows = make_rows([[1, 1, 0]], advantage=2.0, old_logprobs=[[-1.1, -2.1, -1.0]])
    settings = GrpoSettings(loss_type="gspo", loss_agg_type="seq-mean-token-mean")
    entropy = torch.zeros(1, 3, dtype=torch.float64)
    result = policy_term(settings, read_inputs(settings, rows, current, entropy))
    result.loss_BT.sum().backward()
    ratio = math.exp(0.1)
    # the column is float32
    assert result.ratio_BT[0, :2].tolist() == pytest.approx([ratio] * 2, rel=1e-6)
    assert current.grad[0, :2].tolist() == pytest.approx([-2 * ratio] * 2, rel=1e-6)


def test_gspo_is_bounded_above_at_10_nats_with_no_gradient_beyond():
    fields = {"loss_agg_type": "seq-mean-token-mean"}
    close(term(math.exp(12), -1.0, "gspo", **fields), (math.exp(10), 0.0))


@pytest.mark.parametrize("loss_type", ["tis", "topr", "grpo2", "kimi2_5"])
def test_the_weighted_family_selects_a_masked_infinity_away(loss_type):
    rows, current, entropy = random_rows(1)
    masked = ~rows.loss_mask
    current = current.masked_fill(masked, float("-inf")).requires_grad_()
    settings = GrpoSettings(loss_type=loss_type)
    result = policy_term(settings, read_inputs(settings, rows, current, entropy))
    result.loss_BT.sum().backward()
    assert bool((result.loss_BT[masked] == 0).all())
    assert bool(torch.isfinite(current.grad).all())


@pytest.mark.parametrize("loss_type", ["topr", "grpo2"])
def test_a_nan_advantage_gives_a_zero_loss_with_a_nan_gradient(loss_type):
    rows = make_rows([[1, 1]], advantage=[[float("nan"), 1.0]])
    current = torch.full((1, 2), -1.0, requires_grad=True)
    settings = GrpoSettings(loss_type=loss_type)
    result = policy_term(settings, read_inputs(settings, rows, current, torch.zeros(1, 2)))
    result.loss_BT.sum().backward()
    assert result.loss_BT.tolist() == [[0.0, 1.0]]
    assert torch.isnan(current.grad).tolist() == [[True, False]]
