"""Spike detection: finite norms only, whatever a run writes down."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_lib.detect import SpikeDetector, is_spike, upper_median
from replay_lib.errors import SettingsError

NOT_NORMS = (float("nan"), float("inf"), float("-inf"), None)
norms = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("norm", "median", "expected"),
    [
        (2.1, 1.0, True),
        (2.0, 1.0, False),  # strict
        (5.0, 0.0, False),  # every advantage 0 over the window
        (5.0, -1.0, False),
        (5.0, None, False),
        (None, 1.0, False),
        (float("nan"), 1.0, False),
        (float("inf"), 1.0, False),
        (5.0, float("nan"), False),
        (5.0, float("inf"), False),
    ],
)
def test_a_spike_is_finite_and_strictly_above_a_positive_median(norm, median, expected):
    assert is_spike(norm, median, 2.0) is expected


def test_the_median_is_the_upper_one_of_the_finite_values():
    assert upper_median([3.0, 1.0]) == 3.0
    assert upper_median([3.0, 1.0, 2.0]) == 2.0
    assert upper_median([]) is None
    assert upper_median(NOT_NORMS) is None


@given(norms, st.sampled_from(NOT_NORMS), st.data())
def test_the_median_does_not_depend_on_a_non_finite_value_at_any_index(values, odd, data):
    index = data.draw(st.integers(0, len(values)))
    assert upper_median([*values[:index], odd, *values[index:]]) == upper_median(values)


@given(norms, st.sampled_from(NOT_NORMS), st.data())
def test_the_detector_is_not_moved_by_a_non_finite_norm_at_any_step(values, odd, data):
    index = data.draw(st.integers(0, len(values)))
    options = {"warmup_steps": 0, "spike_ratio": 2.0, "history_window": 8}
    clean, dirty = SpikeDetector(**options), SpikeDetector(**options)
    expected = [clean.observe(step, v) for step, v in enumerate(values)]
    found = []
    for step, value in enumerate(values):
        if step == index:
            assert dirty.observe(step, odd) is False
        found.append(dirty.observe(step, value))
    assert (found, dirty.median, dirty.history) == (expected, clean.median, clean.history)


def test_a_nan_before_a_spike_does_not_hide_it():
    detector = SpikeDetector(warmup_steps=0)
    for step, norm in enumerate([0.1, float("nan"), 0.1, 0.1]):
        assert not detector.observe(step, norm)
    assert detector.observe(4, 0.5)
    assert detector.median == 0.1


def test_the_window_holds_the_present_norm_so_one_of_a_single_value_detects_nothing():
    detector = SpikeDetector(warmup_steps=0, history_window=1)
    assert not any(detector.observe(step, 10.0**step) for step in range(9))
    assert detector.median is None


def test_a_history_can_be_given_and_is_filtered():
    detector = SpikeDetector(history=[0.1, float("nan"), None, 0.2], history_window=2)
    assert detector.history == (0.1, 0.2)
    assert detector.observe(500, 1.0)
    assert detector.median == 0.2


def test_defaults_are_the_trainers():
    detector = SpikeDetector(history=[1.0] * 200)
    assert len(detector.history) == 100
    assert not detector.observe(10, 2.0)  # strictly above twice the median
    assert detector.observe(11, 2.0001)


def test_the_first_norm_has_no_median_before_it_and_the_second_has():
    detector = SpikeDetector(warmup_steps=0)
    assert not detector.observe(0, 9.0)
    assert detector.median is None
    assert detector.observe(1, 19.0)
    assert detector.median == 9.0


def test_warm_up_looks_at_the_global_step():
    assert not SpikeDetector(history=[0.1]).observe(9, 1.0)
    assert SpikeDetector(history=[0.1]).observe(10, 1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"history_window": 0}, "history_window: found 0, expected 1 or more"),
        ({"spike_ratio": math.nan}, "spike_ratio: found nan, expected more than 0"),
        ({"spike_ratio": 0.0}, "spike_ratio: found 0.0, expected more than 0"),
        ({"spike_ratio": -2.0}, "spike_ratio: found -2.0, expected more than 0"),
        ({"spike_ratio": math.inf}, "spike_ratio: found inf, expected more than 0"),
    ],
)
def test_settings_that_never_detect_are_refused(options, text):
    with pytest.raises(SettingsError) as error:
        SpikeDetector(**options)
    assert str(error.value) == f"spike detector: {text}"


def test_detection_and_splits_need_no_torch():
    code = "import sys, replay_lib.detect, replay_lib.microbatch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_ratio_under_one_is_a_detector_too():
    detector = SpikeDetector(spike_ratio=0.5, warmup_steps=0)
    assert [detector.observe(step, norm) for step, norm in enumerate([1.0, 0.6, 0.1])] == [
        False,
        True,
        False,
    ]
