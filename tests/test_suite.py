"""Sessions of a case: opened once, not retried when broken, replaced when a worker died."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import fake_engine
import pytest

from replay_lib import devices, run
from replay_lib.case import Case
from replay_lib.errors import BatchError, CaseError, EngineError, SnapshotError
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.run import ReplayOptions
from replay_lib.suite import Sessions, caseless_lines

ROOT = Path(__file__).parents[1]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


class DyingEngine(fake_engine.FakeEngine):
    """Dies in one method, as a worker out of memory does."""

    def run_many(self, experiments):
        for experiment in experiments:
            if "disable" in experiment.name:
                raise EngineError("the worker ended unexpectedly.")
            yield from super().run_many([experiment])


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(Case.from_snapshot(PLAIN), ReplayOptions())


def opened(monkeypatch, engine) -> list[Path]:
    seen: list[Path] = []

    def open_engine(snapshot, options):
        seen.append(snapshot)
        return engine(snapshot, options)

    monkeypatch.setattr(run, "open_engine", open_engine)
    return seen


def test_one_session_serves_all_methods(sessions, monkeypatch):
    seen = opened(monkeypatch, fake_engine.FakeEngine)
    for name in ("baseline", "disable-routing-replay", "balance-negative-advantages"):
        sessions.replay(name, "baseline", "cpu")
    assert len(seen) == 1


def test_a_case_that_cannot_be_opened_is_tried_once(sessions, monkeypatch):
    def broken(snapshot, options):
        raise SnapshotError("no such thing")

    seen = opened(monkeypatch, broken)
    for _ in range(3):
        with pytest.raises(SnapshotError, match="no such thing"):
            sessions.replay("baseline", "baseline", "cpu")
    assert len(seen) == 1


def test_a_worker_that_died_is_replaced_for_the_next_method(sessions, monkeypatch):
    seen = opened(monkeypatch, DyingEngine)
    with pytest.raises(EngineError):
        sessions.replay("disable-routing-replay", "baseline", "cpu")
    assert sessions.replay("baseline", "baseline", "cpu").verdict == "reproduced"
    assert len(seen) == 2


def kept_by(case: Case, labels: Sequence[str] = ()) -> tuple[Sessions, list[tuple[str, str]]]:
    """Sessions, and what they keep: an experiment, and its verdict or its error."""
    kept: list[tuple[str, str]] = []

    def keep(one: Result | Refusal) -> None:
        told = one.error.code if isinstance(one, Refusal) else str(one.verdict)
        kept.append((one.experiment, told))

    return Sessions(case, ReplayOptions(), labels, keep), kept


def test_every_result_is_kept_once_and_the_baseline_too(monkeypatch):
    opened(monkeypatch, fake_engine.FakeEngine)
    sessions, kept = kept_by(Case.from_snapshot(PLAIN), METHODS)
    for _ in range(2):
        sessions.replay(METHODS[0], "baseline", "cpu")
    assert kept == [(METHODS[0], "partial"), (METHODS[1], "fail"), ("baseline", "reproduced")]


def test_a_refused_method_and_a_worker_that_died_are_kept(monkeypatch, tmp_path):
    opened(monkeypatch, fake_engine.FakeEngine)
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "refuse.log"))
    sessions, kept = kept_by(Case.from_snapshot(PLAIN))
    with pytest.raises(BatchError):
        sessions.replay(fake_engine.REFUSED, "baseline", "cpu")
    opened(monkeypatch, DyingEngine)
    sessions, later = kept_by(Case.from_snapshot(PLAIN))
    with pytest.raises(EngineError):
        sessions.replay("disable-routing-replay", "baseline", "cpu")
    assert kept == [(fake_engine.REFUSED, "batch")]
    assert later == [("disable-routing-replay", "engine")]


def test_a_case_that_cannot_be_opened_is_kept_once(monkeypatch):
    def dead(*_):
        raise SnapshotError("no such thing")

    opened(monkeypatch, dead)
    sessions, kept = kept_by(Case.from_snapshot(PLAIN))
    for name in METHODS:
        with pytest.raises(SnapshotError):
            sessions.replay(name, "baseline", "cpu")
    assert kept == [("baseline", "snapshot")]


METHODS = ("balance-negative-advantages", "disable-routing-replay")


@pytest.fixture
def with_quiet(tmp_path) -> Case:
    quiet = fake_engine.quiet_snapshot(tmp_path / "quiet", PLAIN)
    return Case(name="c", snapshot=PLAIN, quiet=quiet)


def test_the_quiet_control_serves_all_methods_in_one_session(with_quiet, monkeypatch):
    seen = opened(monkeypatch, fake_engine.FakeEngine)
    sessions = Sessions(with_quiet, ReplayOptions(), METHODS)
    assert sessions.replay("baseline", "baseline", "cpu").side_effect.verdict == "not_a_spike"
    for name in METHODS:
        effect = sessions.side_effect(name, "cpu")
        assert sessions.replay(name, "baseline", "cpu").side_effect == effect
    assert [path.name for path in seen] == ["quiet", "iter_0000085"]


def test_a_side_effect_alone_does_not_replay_the_spike(with_quiet, monkeypatch):
    seen = opened(monkeypatch, fake_engine.FakeEngine)
    effect = Sessions(with_quiet, ReplayOptions(), METHODS).side_effect(METHODS[1], "cpu")
    assert effect.change == pytest.approx(0.05)
    assert [path.name for path in seen] == ["quiet"]


def test_a_worker_that_died_leaves_the_side_effects(with_quiet, monkeypatch):
    def engine(snapshot, options):
        kind = fake_engine.FakeEngine if "quiet" in snapshot.name else DyingEngine
        return kind(snapshot, options)

    seen = opened(monkeypatch, engine)
    sessions = Sessions(with_quiet, ReplayOptions(), METHODS)
    with pytest.raises(EngineError):
        sessions.replay("disable-routing-replay", "baseline", "cpu")
    result = sessions.replay("balance-negative-advantages", "baseline", "cpu")
    assert result.side_effect.change == pytest.approx(-0.75)
    # one worker died of all methods together, one of the bad one alone, the third lives
    assert [path.name for path in seen] == ["quiet", *["iter_0000085"] * 3]


def test_a_side_effect_of_a_case_without_a_quiet_control(sessions):
    with pytest.raises(CaseError, match="quiet: found none for disable-routing-replay, expected a"):
        sessions.side_effect("disable-routing-replay", "cpu")


def test_tests_without_a_case_are_counted_by_their_reason() -> None:
    def skipped(reason: str) -> SimpleNamespace:
        return SimpleNamespace(longrepr=("test_x.py", 3, f"Skipped: {reason}"))

    stats = {"skipped": [skipped("no case in x"), skipped("no device"), SimpleNamespace()]}
    (line,) = caseless_lines(stats, "no case in x")
    assert line.startswith("no case in x: 1 test that asks for one was skipped. Name a directory")
    assert caseless_lines(stats, "no case in y") == caseless_lines({}, "no case in x") == []


def test_a_session_is_opened_on_the_devices_of_its_worker(sessions, monkeypatch):
    seen = []

    def open_engine(snapshot, options):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return fake_engine.FakeEngine(snapshot, options)

    monkeypatch.setattr(run, "open_engine", open_engine)
    monkeypatch.setattr(devices, "visible_devices", lambda: ("0", "1"))
    monkeypatch.setenv(devices.XDIST_WORKER, "gw3")
    sessions.replay("disable-routing-replay", "baseline", "cpu")
    assert seen == ["1"]
