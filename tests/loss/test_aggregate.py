"""Eight aggregations by hand, and their behaviour on empty masks and masked NaNs."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from replay_lib.loss.aggregate import aggregate
from replay_lib.loss.settings import ValueAggType

VALUES = torch.tensor([[1.0, 2.0, 6.0, 9.0], [4.0, 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
# masked values: 1, 2, 6 | 4 | none
BY_HAND = {
    "token-mean": 13 / 4,
    "seq-mean-token-mean": (3 + 4) / 2,
    "seq-mean-token-std": ((14 / 3) ** 0.5 + 1e-5) / 2,
    "token-max": 6.0,
    "token-min": 1.0,
    "token-std": (57 / 4 - (13 / 4) ** 2) ** 0.5,
    "token-p05": 1 + 0.15,
    "token-p95": 4 + 0.85 * 2,
}
EMPTY = {
    "token-max": float("-inf"),
    "token-min": float("inf"),
    "token-std": 1e-5,
}


def test_every_mode_has_a_value_by_hand():
    assert set(BY_HAND) == set(get_args(ValueAggType))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", BY_HAND)
def test_by_hand(mode, dtype):
    result = aggregate(VALUES.to(dtype), MASK, mode)
    assert result.dtype == dtype
    assert result.shape == ()
    assert float(result) == pytest.approx(BY_HAND[mode], rel=1e-6)  # float32 arithmetic


@pytest.mark.parametrize("mode", BY_HAND)
def test_over_an_empty_mask(mode):
    values = VALUES.clone().requires_grad_()
    result = aggregate(values, torch.zeros_like(MASK), mode)
    result.backward()  # never an error; the extremes have a gradient where the mask hides it
    assert result.item() == pytest.approx(EMPTY.get(mode, 0.0))
    assert not values.grad.any()


@pytest.mark.parametrize("mode", BY_HAND)
def test_a_masked_nan_poisons_all_modes_but_those_that_select(mode):
    values = VALUES.clone()
    values[0, 3] = float("nan")
    selects = mode in ("token-max", "token-min", "token-p05", "token-p95")
    assert bool(torch.isnan(aggregate(values, MASK, mode))) == (not selects)


@pytest.mark.parametrize("mode", BY_HAND)
def test_gradients_stay_on_the_mask(mode):
    values = VALUES.clone().requires_grad_()
    aggregate(values, MASK, mode).backward()
    assert bool((values.grad[~MASK] == 0).all())
    assert bool((values.grad[MASK] != 0).any())


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-std"])
def test_rows_without_tokens_are_no_sequences(mode):
    one = aggregate(VALUES[:1], MASK[:1], mode)  # a single row is its own mean
    beside = torch.cat([MASK[:1], torch.zeros_like(MASK[:1])])
    assert torch.equal(aggregate(VALUES[:2], beside, mode), one)
    assert float(one) == pytest.approx(3.0 if mode == "seq-mean-token-mean" else (14 / 3) ** 0.5)


def test_a_deviation_of_equal_values_is_the_root_of_epsilon():
    row = MASK[2:] | True
    for mode in ("token-std", "seq-mean-token-std"):
        assert float(aggregate(VALUES[2:], row, mode)) == pytest.approx(1e-5, rel=1e-6)


def test_counts_are_exact_in_float32_and_never_zero():
    ones = torch.ones(1, 4)
    for tokens in (1, 3):
        mask = torch.arange(4)[None] < tokens
        assert float(aggregate(ones, mask, "token-mean")) == 1.0  # 1e-10 beside a count is nothing
    assert float(aggregate(ones.double(), MASK[:1], "token-mean")) == 1.0
