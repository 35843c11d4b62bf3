"""Conditions of norms: histories, missing and broken ones, and what a quiet step may suffer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutate
import mutate_files
import mutate_values
import pytest

from replay_lib import verdict
from replay_lib.analysis import examine
from replay_lib.case import Case, Limit, Thresholds
from replay_lib.detect import SpikeDetector, upper_median
from replay_lib.errors import CaseError
from replay_lib.listing import describe_snapshot
from replay_lib.noise import noise_of
from replay_lib.record.result import SideEffect
from replay_lib.recorder import Event, SpikeRecorder
from replay_lib.rule import Verdict
from replay_lib.snapshot import Content, Snapshot, open_snapshot

Write = Callable[[Content], Snapshot]
NAN, INF = math.nan, math.inf
HISTORY = [1.0, 1.2, 0.9, 1.1, 1.05, 0.95, 1.15, 1.3, 0.8, 1.0, 1.02, 0.97]


def judged(recorded: float | None, median: float | None, norm: float) -> verdict.Judgement:
    """The verdict on a baseline."""
    return verdict.judge(
        verdict.Measured(
            recorded_norm=recorded,
            median_norm=median,
            spike_ratio=2.0,
            baseline_norm=norm,
            repeat_spread=0.0,
            tolerance=verdict.Bound(1e-5, "a test"),
            noise=noise_of("float32", "cpu"),
            stored=verdict.Variant(norm=norm, compared_norm=norm),
            is_baseline=True,
        )
    )


@pytest.mark.parametrize("value", [NAN, INF, -INF, None])
def test_d1_a_spike_after_a_broken_norm_is_found(value: float | None) -> None:
    detector = SpikeDetector(warmup_steps=3)
    seen = [
        detector.observe(step, norm)
        for step, norm in enumerate([*mutate_values.with_one(HISTORY, 6, value), 5.0])
    ]
    assert seen == [False] * (len(HISTORY) + 1) + [True]


def test_d1_nan_is_its_own_finding(write: Write, content: Content) -> None:
    found = examine(write(mutate.norms(content, NAN, 2.1)).path).codes
    assert {"norm-not-finite"} == found - {"rows-padding"}
    assert judged(8.0, 2.0, NAN).verdict is Verdict.NON_FINITE
    assert "not finite: baseline nan" in judged(8.0, 2.0, NAN).reason


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_d2_the_median_does_not_depend_on_where_it_stands(value: float | None) -> None:
    medians = {upper_median(h) for h in mutate_values.with_one_at_each(HISTORY, value)}
    assert medians == {upper_median(HISTORY)} == {sorted(HISTORY)[len(HISTORY) // 2]}


def test_d3_a_step_without_a_norm_is_an_event_of_its_own(tmp_path: Path) -> None:
    def content(_median: Any) -> Any:
        raise AssertionError("nothing is written")

    recorder = SpikeRecorder(tmp_path, history=HISTORY)
    for norm, told in ((None, "missing"), (NAN, "nan")):
        observed = recorder.observe(50, norm, content)
        assert observed.event is Event.NON_FINITE and told in observed.note
    assert recorder.detector.history == tuple(HISTORY)


@pytest.mark.parametrize("norm", [None, NAN, INF])
def test_d3_a_snapshot_without_a_norm_is_no_crash(
    write: Write, content: Content, norm: float | None
) -> None:
    snapshot = write(mutate.norms(content, norm, 2.1))
    assert json.loads(json.dumps(describe_snapshot(snapshot.path), allow_nan=False))
    found = examine(snapshot.path).codes
    assert ("norm-missing" if norm is None else "norm-not-finite") in found
    assert judged(snapshot.grad_norm_preclip, 2.1, 8.0).verdict is Verdict.REFERENCE_MISSING


@pytest.mark.parametrize("median", [0.0, None, NAN, INF])
def test_b11_a_median_of_zero_gives_no_ratio(
    write: Write, content: Content, median: float | None
) -> None:
    snapshot = write(mutate.norms(mutate.no_advantage(content), 0.0, median))
    assert {"advantage-zero", "median-undefined"} <= examine(snapshot.path).codes
    text = json.dumps(examine(snapshot.path).as_json(), allow_nan=False)
    assert "Infinity" not in text and describe_snapshot(snapshot.path)["ratio"] is None
    assert judged(8.0, median, 8.0).verdict is Verdict.RATIO_UNDEFINED


def test_d10_a_method_that_moves_an_ordinary_step_is_named() -> None:
    quiet = {"verdict": Verdict.NOT_A_SPIKE, "reason": "quiet", "quiet_baseline_norm": 1.0}
    budget = Thresholds().quiet_norm_change
    factor = float(mutate_values.larger_advantage(1.5).rpartition("=")[2])
    loud = SideEffect(quiet_norm=factor, change=factor - 1, budget=budget.value, **quiet)
    assert loud.beyond_budget == ("norm +50.0% (10% is allowed)",) and not loud.red
    assert loud.explain() == (
        "the quiet control's norm changes by +50.0%, cosine not known; "
        "beyond the budget: norm +50.0% (10% is allowed)"
    )
    mild = SideEffect(quiet_norm=1.1, change=0.1, budget=budget.value, **quiet)
    assert not mild.beyond_budget and "budget" not in mild.explain()
    carried = SideEffect(change=0.0, change_carried=-0.9, budget=budget.value, **quiet)
    assert carried.beyond_budget
    broken = SideEffect(change=NAN, budget=budget.value, **quiet)
    assert broken.beyond_budget  # what is not finite is never within a bound
    assert not SideEffect(change=9.0, **quiet).beyond_budget  # no budget, nothing beyond it


def test_d10_a_method_that_turns_an_ordinary_step_is_named() -> None:
    quiet = {"verdict": Verdict.NOT_A_SPIKE, "reason": "quiet", "quiet_baseline_norm": 1.0}
    least = Thresholds().quiet_cosine.value
    turned = SideEffect(quiet_norm=1.0, change=0.0, cosine=0.949, cosine_budget=least, **quiet)
    assert turned.beyond_budget == ("cosine 0.949 (0.95 is needed)",) and not turned.red
    straight = SideEffect(quiet_norm=1.0, change=0.0, cosine=0.95, cosine_budget=least, **quiet)
    assert straight.beyond_budget == ()
    assert straight.explain() == "the quiet control's norm changes by +0.0%, cosine 0.950"
    both = {"cosine": 1.0, "cosine_carried": 0.3, "cosine_budget": least}
    carried = SideEffect(quiet_norm=1.0, change=0.0, **both, **quiet)
    assert carried.beyond_budget == ("cosine 0.300 (0.95 is needed)",)
    broken = SideEffect(quiet_norm=1.0, change=0.0, cosine=NAN, cosine_budget=least, **quiet)
    assert broken.beyond_budget
    gone = SideEffect(quiet_norm=0.0, change=-1.0, cosine_budget=least, **quiet)
    assert gone.beyond_budget == ("cosine undefined, the gradient is zero (0.95 is needed)",)
    unknown = SideEffect(quiet_norm=1.0, change=0.0, cosine_budget=least, **quiet)
    assert unknown.beyond_budget == () and not unknown.measured


def test_d10_a_case_states_its_own_budget(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text(
        f"schema: 1\nsnapshot: copy/{copy.name}\n"
        "thresholds:\n  quiet_norm_change: {value: 0.5, reason: quiet norms of this run scatter}\n"
        "  quiet_cosine: {value: 0.8, reason: and so do their directions}\n"
    )
    limits = Case.load(tmp_path).thresholds
    assert limits.quiet_norm_change == Limit(value=0.5, reason="quiet norms of this run scatter")
    assert limits.quiet_cosine == Limit(value=0.8, reason="and so do their directions")


def test_d10_a_cosine_beyond_one_is_no_budget(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text(
        f"schema: 1\nsnapshot: copy/{copy.name}\n"
        "thresholds:\n  quiet_cosine: {value: 1.5, reason: a slip}\n"
    )
    with pytest.raises(CaseError, match=r"quiet_cosine.*a cosine is at most 1, not 1\.5"):
        Case.load(tmp_path)


@pytest.mark.parametrize("word", [NAN, INF, -INF, None])
@pytest.mark.parametrize("key", ["grad_norm", "grad_norm_median", "spike_ratio_actual"])
def test_e19_bare_words_are_read_as_what_they_say(copy: Path, key: str, word: Any) -> None:
    mutate_files.bare_words(copy, **{key: word})
    snapshot = open_snapshot(copy)
    read = {
        "grad_norm": snapshot.grad_norm_preclip,
        "grad_norm_median": snapshot.grad_norm_median,
        "spike_ratio_actual": snapshot.spike_ratio_recorded,
    }[key]
    assert repr(read) == repr(word)
    assert json.dumps(describe_snapshot(copy), allow_nan=False)
    assert json.dumps(examine(copy).as_json(), allow_nan=False)


def test_e19_metadata_of_version_one(copy: Path) -> None:
    mutate_files.legacy_metadata(copy)
    snapshot = open_snapshot(copy)
    assert snapshot.legacy and snapshot.metadata_version is None
    assert examine(copy).codes == {"metadata-legacy", "rows-padding"}


@pytest.mark.parametrize("norm", [None, NAN, 0.0, -1.0])
def test_e19_a_missing_reference_is_never_reproduced(norm: float | None) -> None:
    found = judged(norm, 2.0, 8.0)
    assert found.verdict is Verdict.REFERENCE_MISSING
    assert judged(8.0, 2.0, 8.0).verdict is Verdict.REPRODUCED  # the control


def test_the_history_is_no_special_order() -> None:
    shuffled = random.Random(0).sample(HISTORY, len(HISTORY))
    assert upper_median(shuffled) == upper_median(HISTORY)
