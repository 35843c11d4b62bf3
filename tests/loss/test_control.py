"""KL and entropy terms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import make_rows

from replay_lib.loss import GrpoSettings, micro_batch_loss
from replay_lib.loss.control import entropy_term, kl_term, top_entropy_mask
from replay_lib.loss.inputs import read_inputs

ROWS = make_rows([[1, 1, 0]], old_logprobs=-1.0, ref_logprobs=-3.0)
CURRENT = torch.tensor([[-2.0, -1.0, -9.0]])


def test_k2_is_half_the_square_against_the_old_policy_unless_told():
    for base, expected in (("old_logprobs", 0.25), ("ref_logprobs", (0.5 + 2.0) / 2)):
        settings = GrpoSettings(kl_base_logprobs=base)
        inputs = read_inputs(settings, ROWS, CURRENT, torch.zeros(1, 3))
        assert float(kl_term(settings, inputs)) == pytest.approx(expected)


def test_one_masked_infinity_makes_the_loss_nan_with_kl_control_off():
    current = CURRENT.clone()
    current[0, 2] = float("-inf")
    settings = GrpoSettings(loss_type="tis", kl_control_alpha=0.0)
    assert math.isnan(micro_batch_loss(settings, ROWS, current, torch.zeros(1, 3)).loss)


def test_the_entropy_term_squares_the_mean_not_each_token():
    settings = GrpoSettings(entropy_control={"alpha": 0.5, "target_entropy": 1.0})
    entropy = torch.tensor([[1.0, 4.0, 100.0]], requires_grad=True)
    squared, mean = entropy_term(settings, read_inputs(settings, ROWS, CURRENT, entropy))
    squared.backward()
    assert (float(squared.detach()), float(mean)) == (2.25, 2.5)
    assert entropy.grad.tolist() == [[1.5, 1.5, 0.0]]


def test_without_control_the_loss_does_not_depend_on_entropies():
    entropy = torch.full((1, 3), float("nan"), requires_grad=True)
    current = CURRENT.clone().requires_grad_()
    result = micro_batch_loss(GrpoSettings(loss_type="tis"), ROWS, current, entropy)
    result.scaled.backward()
    assert entropy.grad is None
    assert bool(torch.isfinite(current.grad).all())


def test_the_largest_entropies_are_picked_with_ties():
    entropy = torch.tensor([[1.0, 3.0, 3.0, 2.0, 9.0], [5.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    picked = top_entropy_mask(entropy, mask, 0.25)
    assert picked.tolist() == [[False, True, True, False, False], [False] * 5]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.floats(0.01, 0.99),
    st.data(),
)
def test_at_least_the_share_is_picked_and_nothing_smaller_stays_in(values, share, data):
    mask = torch.tensor(
        [data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))]
    )
    entropy = torch.tensor([values], dtype=torch.float32)
    picked = top_entropy_mask(entropy, mask, share)
    tokens = int(mask.sum())
    wanted = math.ceil(float(torch.tensor(float(tokens)) * share))
    assert bool((picked <= mask).all())
    assert int(picked.sum()) >= wanted
    if tokens:
        least = entropy[picked].min()
        assert bool((entropy[mask & ~picked] < least).all())
        assert int((entropy[picked] > least).sum()) < wanted


@pytest.mark.parametrize("alpha", [-1.0, -0.5, 0.0])
def test_an_entropy_weight_that_is_not_positive_is_no_control(alpha):
    settings = GrpoSettings(entropy_control={"alpha": alpha, "target_entropy": 1.0})
    entropy = torch.tensor([[1.0, 4.0, 100.0]])
    squared, mean = entropy_term(settings, read_inputs(settings, ROWS, CURRENT, entropy))
    assert (float(squared), float(mean)) == (0.0, 2.5)


def test_a_small_weight_is_a_control():
    settings = GrpoSettings(entropy_control={"alpha": 1e-3, "target_entropy": 4.0})
    entropy = torch.tensor([[1.0, 4.0, 100.0]])
    squared, _ = entropy_term(settings, read_inputs(settings, ROWS, CURRENT, entropy))
    assert float(squared) == 2.25  # (4 - 2.5)^2


@pytest.mark.parametrize("share", [1.0, 1.5, 2.0])
def test_a_share_of_one_or_more_takes_every_loss_token(share):
    settings = GrpoSettings(entropy_control={"alpha": 1.0, "top_quantile": share})
    entropy = torch.tensor([[1.0, 4.0, 100.0]])
    _, mean = entropy_term(settings, read_inputs(settings, ROWS, CURRENT, entropy))
    assert float(mean) == 2.5


def test_one_of_two_is_the_half_and_rows_are_counted_by_themselves():
    entropy = torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    picked = top_entropy_mask(entropy, mask, 0.5)
    assert picked.tolist() == [[True, False, True, False], [False, True, False, False]]
