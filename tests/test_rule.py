"""The rule and its words: figures of a few numbers, at their borders."""

from __future__ import annotations

import math

import pytest

from replay_lib.rule import (
    RECORDING_REDUCTION,
    TARGET_RATIO,
    Status,
    Verdict,
    ratio_of,
    reduction_of,
    relative_difference,
    rule,
    status_of,
)


def test_thresholds_are_the_published_ones() -> None:
    assert (TARGET_RATIO, RECORDING_REDUCTION) == (1.5, 0.15)
    assert rule(3.0, 2.0, 100.0) is Verdict.PASS  # exactly at the target
    assert rule(math.nextafter(3.0, 4.0), 2.0, 3.0) is Verdict.FAIL


@pytest.mark.parametrize("divisor", [None, 0.0, -2.0, math.nan, math.inf])
def test_nothing_is_divided_by_what_is_no_norm(divisor: float | None) -> None:
    assert ratio_of(3.0, divisor) is None
    assert reduction_of(3.0, divisor) is None


def test_ratio_and_reduction() -> None:
    assert (ratio_of(3.0, 2.0), reduction_of(3.0, 4.0), reduction_of(5.0, 4.0)) == (
        1.5,
        0.25,
        -0.25,
    )


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [(9.0, 8.0, 0.125), (7.0, 8.0, 0.125), (-9.0, -8.0, 0.125), (8.0, -8.0, 2.0)],
)
def test_a_relative_difference_has_no_sign(value: float, reference: float, expected: float) -> None:
    assert relative_difference(value, reference) == expected


@pytest.mark.parametrize("reference", [None, 0.0, math.nan, math.inf])
def test_no_relative_difference_without_a_reference(reference: float | None) -> None:
    assert relative_difference(1.0, reference) is None


def test_a_reduction_of_exactly_what_is_worth_recording_makes_a_partial_method() -> None:
    at = {"fidelity": "full", "reduction": RECORDING_REDUCTION}
    assert status_of(Verdict.PARTIAL, **at) is Status.PARTIAL
    assert status_of(Verdict.PARTIAL, fidelity="full", reduction=0.1499) is Status.NEGATIVE
    assert status_of(Verdict.PARTIAL, fidelity="full") is Status.NEGATIVE
    assert status_of(Verdict.PASS, fidelity="reduced") is Status.NEGATIVE
