"""Two gradients and the words for their difference, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from replay_lib.guard.gradients import Difference, difference, from_products

BOUND = 1e-4


def of(tmp_path, mine, theirs) -> Difference:
    for name, values in (("a", mine), ("b", theirs)):
        split = {"first": values[:1], "second": values[1:]}
        torch.save({k: torch.tensor(v) for k, v in split.items()}, tmp_path / name)
    return difference(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("mine", "theirs", "expected", "words"),
    [
        ([3.0, 4.0], [3.0, 4.0], (1.0, 1.0, 0.0), None),
        ([3.0, 4.00001], [3.0, 4.0], (1.0, 1.0, 2e-6), None),
        ([6.0, 8.0], [3.0, 4.0], (1.0, 2.0, 1.0), "is scaled by 2, its direction kept (cosine 1.0"),
        ([-3.0, -4.0], [3.0, 4.0], (-1.0, 1.0, 2.0), "is reversed, x -1 (cosine -1.000000"),
        ([4.0, -3.0], [3.0, 4.0], (0.0, 1.0, math.sqrt(2)), "turned: cosine 0.000000"),
        ([0.0, 0.0], [3.0, 4.0], (None, 0.0, 1.0), "the gradient vanished"),
    ],
)
def test_differences_by_hand(tmp_path, mine, theirs, expected, words):
    found = of(tmp_path, mine, theirs)
    cosine, scale, distance = expected
    assert found.cosine == (None if cosine is None else pytest.approx(cosine, abs=1e-9))
    assert found.scale == pytest.approx(scale, rel=1e-5)
    assert found.distance == pytest.approx(distance, rel=1e-2, abs=1e-12)
    told = found.describe(BOUND)
    assert told is None if words is None else words in told


def test_a_reference_of_zero_and_what_is_not_finite():
    assert from_products(0.0, 0.0, 0.0, 0.0).describe(BOUND) is None
    for spoilt in (from_products(0.0, 4.0, 0.0, 4.0), from_products(math.nan, 1.0, 1.0, 1.0)):
        assert spoilt.cosine is None
        assert "cannot be compared" in spoilt.describe(BOUND)
