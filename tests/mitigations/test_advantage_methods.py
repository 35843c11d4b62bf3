"""Methods that change advantages, on numbers written out by hand."""

from __future__ import annotations

import pytest
import torch
from hand_made import METHODS, make_batch, on_batch

from replay_lib.errors import PatchError


def advantages(slug, values, mask, **params) -> list[list[float]]:
    batch = make_batch(mask, advantage=values)
    return on_batch(slug, batch, **params).advantage.tolist()


def test_advantages_are_clipped_on_both_sides():
    clipped = advantages("clip-advantages", [[0.5, -3.0, 2.0]], [[1, 1, 1]], bound=1.5)
    assert clipped == [[0.5, -1.5, 1.5]]


def test_centred_advantages_sum_to_zero_over_loss_tokens():
    # mean of 1, 3 and -1 is 1; the masked 7 has no say and stays
    assert advantages("centre-advantages", [[1.0, 7.0], [3.0, -1.0]], [[1, 0], [1, 1]]) == [
        [0.0, 7.0],
        [2.0, -2.0],
    ]


def test_normalised_advantages_have_mean_0_and_deviation_1():
    # 1, 3, 5: mean 3, deviation 2 (n - 1); exact in float32
    values = [[1.0, 3.0], [5.0, 9.0]]
    assert advantages("normalise-advantages", values, [[1, 1], [1, 0]]) == [[-1.0, 0.0], [1.0, 9.0]]


@pytest.mark.parametrize("slug", ["centre-advantages", "normalise-advantages"])
def test_a_rank_without_loss_tokens_is_left_alone(slug):
    assert advantages(slug, [[1.0, 2.0]], [[0, 0]]) == [[1.0, 2.0]]


@pytest.mark.parametrize("mask", [[[1, 1]], [[1, 0]]])
def test_equal_advantages_and_a_single_one_have_no_deviation_to_divide_by(mask):
    assert advantages("normalise-advantages", [[2.0, 2.0]], mask) == [[2.0, 2.0]]


def test_a_nan_is_not_hidden():
    centred = advantages("centre-advantages", [[float("nan"), 1.0]], [[1, 1]])
    assert torch.tensor(centred).isnan().all()
    kept = advantages("normalise-advantages", [[float("nan"), 1.0]], [[1, 1]])
    assert torch.tensor(kept).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("slug", "params", "said"),
    [
        ("clip-advantages", {"bound": 0.0}, "expected > 0"),
        ("normalise-advantages", {"eps": -1.0}, "expected >= 0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(slug, params, said):
    with pytest.raises(PatchError, match=said):
        METHODS[slug].patches(params)
