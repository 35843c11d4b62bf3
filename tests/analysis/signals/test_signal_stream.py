"""Moments, quantiles and histograms: whole against in pieces, and against numpy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_lib.analysis.signals import stream
from replay_lib.analysis.signals.figures import QUANTILES, Distribution
from replay_lib.analysis.signals.stream import ERROR, Bins, Stream

VALUES = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=60)


def told(values: list[float], cuts: list[int] | None = None) -> Distribution:
    found = Stream()
    edges = [0, *sorted(c % (len(values) + 1) for c in cuts or []), len(values)]
    for start, end in pairwise(edges):
        found.add(torch.tensor(values[start:end], dtype=torch.float32))
    return found.distribution()


@settings(max_examples=50)  # a sketch has a million bins to add up
@given(VALUES, st.lists(st.integers(0, 60), max_size=5), st.booleans())
def test_pieces_give_what_the_whole_gives(
    values: list[float], cuts: list[int], sketched: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "EXACT", 3 if sketched else 1 << 20)
        whole, pieces = told(values), told(values, cuts)
    close = {"mean", "std"}
    assert pieces.model_dump(exclude=close) == whole.model_dump(exclude=close)
    scale = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    for name in close:
        expected = getattr(whole, name)
        assert getattr(pieces, name) == (
            None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-9 * scale)
        )


@given(VALUES.filter(lambda v: any(math.isfinite(x) for x in v)))
def test_quantiles_are_values_of_the_data(values: list[float]) -> None:
    finite = numpy.array([v for v in values if math.isfinite(v)], dtype=numpy.float32)
    found = told(values)
    assert (found.count, found.nonfinite) == (len(finite), len(values) - len(finite))
    expected = numpy.quantile(finite, QUANTILES, method="inverted_cdf")
    assert found.quantiles == tuple(expected.tolist())
    assert found.error == 0.0


@settings(max_examples=30)
@given(VALUES.filter(lambda v: sum(map(math.isfinite, v)) > 3))
def test_sketched_quantiles_are_within_the_stated_error(values: list[float]) -> None:
    exact = told(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "EXACT", 3)
        found = told(values)
    assert found.error == ERROR == 2.0**-12
    for sketched, true in zip(found.quantiles, exact.quantiles, strict=True):
        assert abs(sketched - true) <= ERROR * abs(true) + 2.0**-126
    assert (found.minimum, found.maximum) == (exact.minimum, exact.maximum)


def test_moments_by_hand() -> None:
    found = told([1.0, 2.0, float("nan"), 3.0, 6.0, float("inf")], cuts=[2, 4])
    assert (found.count, found.nonfinite, found.mean) == (4, 2, 3.0)
    assert found.std == pytest.approx(math.sqrt(14 / 4))
    assert (found.quantile(0.5), found.quantile(0.75), found.maximum) == (2.0, 3.0, 6.0)


def test_nothing_has_no_figures() -> None:
    found = told([float("nan")])
    assert found == Distribution(count=0, nonfinite=1)
    assert found.quantile(0.5) is None


def test_a_histogram_counts_every_finite_value_once() -> None:
    bins = Bins((0.0, 1.0, 2.0))
    bins.add(torch.tensor([-1.0, 0.0, 0.5, 1.0, float("nan")]))
    bins.add(torch.tensor([2.0, 2.5, float("inf")]))
    found = bins.histogram()
    assert (found.below, found.counts, found.above) == (1, (2, 2), 1)
