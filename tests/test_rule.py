"""The rule and its words: figures of a few numbers, at their borders."""

from __future__ import annotations

import math
from typing import Any

import pytest

from replay_lib.rule import (
    RECORDING_REDUCTION,
    TARGET_RATIO,
    Flag,
    Status,
    Verdict,
    compare,
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


def test_one_order_from_best_to_worst() -> None:
    assert [str(v) for v in Verdict] == [
        "reproduced",
        "pass",
        "partial",
        "not_applicable",
        "inconclusive",
        "fail",
        "degenerate",
        "no_op",
        "not_a_spike",
        "not_reproduced",
        "non_finite",
        "ratio_undefined",
        "reference_missing",
    ]
    assert compare(Verdict.PASS, Verdict.PARTIAL) == "better"
    assert compare(Verdict.PARTIAL, Verdict.PARTIAL) == "as expected"
    assert compare(Verdict.NO_OP, Verdict.FAIL) == "worse"


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (Verdict.PARTIAL, "better"),
        (Verdict.INCONCLUSIVE, "better"),
        (Verdict.FAIL, "as expected"),
        (Verdict.DEGENERATE, "worse"),  # between them, and neither
        (Verdict.NO_OP, "as expected"),
        (Verdict.NOT_REPRODUCED, "worse"),
    ],
)
def test_of_several_expected_verdicts_each_is_as_expected(verdict: Verdict, told: str) -> None:
    assert compare(verdict, Verdict.FAIL, Verdict.NO_OP) == told
    assert compare(verdict, Verdict.NO_OP, Verdict.FAIL) == told


def test_only_a_clean_full_pass_proves() -> None:
    assert status_of(Verdict.PASS, fidelity="folded", reduction=0.7) is Status.PROVEN
    partial: list[dict[str, Any]] = [
        {"fidelity": "reduced"},
        {"fidelity": "full", "flags": (Flag.OLD_SENSITIVE,)},
        {"fidelity": "full", "flags": (Flag.UNIT_UNCHECKED,)},
        {"fidelity": "full", "flags": (Flag.BEYOND_BUDGET,)},
        {"fidelity": "full", "quiet_fault": True},
    ]
    for conditions in partial:
        assert status_of(Verdict.PASS, reduction=0.7, **conditions) is Status.PARTIAL
    assert status_of(Verdict.PARTIAL, fidelity="full", reduction=0.2) is Status.PARTIAL
    assert status_of(Verdict.INCONCLUSIVE, fidelity="full", reduction=0.2) is Status.PARTIAL
    assert status_of(Verdict.INCONCLUSIVE, fidelity="full", reduction=0.1) is Status.NEGATIVE
    assert status_of(Verdict.DEGENERATE, fidelity="full", reduction=0.9) is Status.NEGATIVE
    assert status_of(Verdict.FAIL, fidelity="full", reduction=0.1) is Status.NEGATIVE
    assert status_of(Verdict.PASS, fidelity="full", diagnostic=True) is Status.DIAGNOSTIC
