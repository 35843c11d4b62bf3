"""What a pytest run keeps: baselines of figures, a folder of results; and its part of the shards.

Results come with the tests' reports, from xdist's workers too. Files are written by one process,
the one that the user started. No torch at import.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from replay_lib.case import Case
from replay_lib.errors import SpikeReplayError
from replay_lib.pytest_cases import cases_dir, cases_of, labels_of, params_of
from replay_lib.record.baseline_update import abandoned, grouped, is_full, orphans, update
from replay_lib.record.result import Result
from replay_lib.record.run_folder import TestOutcome, add_to_run, finish_run, start_run
from replay_lib.record.shards import Shard, shard_of_file, split_cases
from replay_lib.suite import results_in

LINES = pytest.StashKey[list[str]]()
_MOVED = "spike_replay_moved"
FLUSH_SECONDS = 2.0  # how much of a run a kill may cost; a write takes milliseconds
WRITTEN = "baselines were written, so this run fails; the next one compares with them"
ORPHAN = "a full run with --update-baselines puts that right"
ABANDONED = "delete the file, or restore its case"
_OVER = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def shard_of(config: pytest.Config) -> Shard | None:
    """What ``--shard`` asks for; UsageError (ours) where it is no shard."""
    text = config.getoption("--shard")
    return None if text is None else Shard.parse(text)


def results_folder(config: pytest.Config) -> Path | None:
    """What ``--spike-results`` names."""
    folder: Path | None = config.getoption("--spike-results")
    return folder


def cases_here(config: pytest.Config) -> list[Case]:
    """The cases of this run's shard; all of them without shards."""
    shard, cases = shard_of(config), cases_of(config)
    if shard is None:
        return cases
    places = split_cases(cases, shard.count)
    return [case for case in cases if places[case.name] == shard.index]


class ShardSelection:
    """Leaves the tests of other shards out; asked last, so it sees what ``-k`` and ``-m`` left."""

    def __init__(self, config: pytest.Config, shard: Shard) -> None:
        self._config = config
        self._shard = shard
        self._moved = 0  # selected tests that belong to other shards

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Every test is in exactly one shard: with its case, or else with its file."""
        places = split_cases(cases_of(self._config), self._shard.count)
        others = [item for item in items if self._place(item, places) != self._shard.index]
        self._moved = len(others)
        if others:
            self._config.hook.pytest_deselected(items=others)
            gone = set(others)
            items[:] = [item for item in items if item not in gone]

    def _place(self, item: pytest.Item, places: dict[str, int]) -> int:
        case = params_of(item).get("case")
        if isinstance(case, Case) and case.name in places:
            return places[case.name]
        return shard_of_file(item.nodeid.partition("::")[0], self._shard.count)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker of xdist left out."""
        self._moved += getattr(node, "workeroutput", {}).get(_MOVED, 0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A shard without a test is no failure where other shards have the tests."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_MOVED] = self._moved
        elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._moved:
            session.exitstatus = pytest.ExitCode.OK


class RunKeeper:
    """Gathers what the tests of a run report, and writes it down; one a run, in one process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = results_folder(config)
        self._results: list[Result] = []
        self._ended: list[TestOutcome] = []
        self._phases: dict[str, list[pytest.TestReport]] = {}
        self._kept = (0, 0)  # how many outcomes and results are in the folder
        self._flushed = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The tests that will run; under xdist it is the workers that know."""
        if session.items:
            self._start([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """All workers collect the same tests."""
        self._start(ids)

    def _start(self, nodeids: Sequence[str]) -> None:
        if self._folder is None or self._config.getoption("collectonly"):
            return
        try:
            start_run(self._folder, shard_of(self._config), map(self._plain, nodeids))
        except SpikeReplayError as error:
            raise pytest.UsageError(str(error)) from error

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's result; after its last phase its outcome is known."""
        self._results += results_in([report])
        self._phases.setdefault(report.nodeid, []).append(report)
        if report.when != "teardown":
            return
        phases = self._phases.pop(report.nodeid)
        self._ended.append(outcome_of(self._plain(report.nodeid), phases))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self._folder is not None:
            tests, results = self._kept
            add_to_run(self._folder, self._ended[tests:], self._results[results:])
            self._kept = (len(self._ended), len(self._results))
        self._flushed = time.monotonic()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write or check baselines, close the folder; what is wrong turns the run red."""
        if self._config.getoption("collectonly"):
            return
        faults: list[str] = []
        try:
            faults = self._baselines() if session.exitstatus in _OVER else []
            self._flush()
            if self._folder is not None and self._ended:
                finish_run(self._folder, faults)
        except SpikeReplayError as error:
            faults.append(str(error))
        self._config.stash.setdefault(LINES, []).extend(faults)
        if faults and session.exitstatus in _OVER:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _baselines(self) -> list[str]:
        """What is wrong with the baselines, or was written into them."""
        if not self._results:
            return []
        config, cases = self._config, cases_here(self._config)
        lines = self._update(cases) if config.getoption("--update-baselines") else []
        if not lines:
            unused = orphans(cases, self._results, lambda case: labels_of(config, case))
            lines += [f"{line}; {ORPHAN}" for line in unused]
        if self._all_cases(cases):
            lines += [f"{line}; {ABANDONED}" for line in abandoned(cases_dir(config))]
        return lines

    def _update(self, cases: Sequence[Case]) -> list[str]:
        """What was written; what was left out is told, but is no fault of its own."""
        config = self._config
        updated = update(cases, self._results, lambda case: labels_of(config, case))
        if updated.written:
            return [*updated.lines, WRITTEN]
        config.stash.setdefault(LINES, []).extend(updated.lines)
        return []

    def _all_cases(self, cases: Sequence[Case]) -> bool:
        """Whether every case ran in full, in whatever environment."""
        full = {
            case.name
            for case, _, found in grouped(cases, self._results)
            if is_full(found, labels_of(self._config, case))
        }
        return full == {case.name for case in cases}

    def _plain(self, nodeid: str) -> str:
        """A test's name without the group that xdist writes behind it."""
        head, at, group = nodeid.rpartition("@")
        grouped_ = at and any(case.name == group for case in cases_of(self._config))
        return head if grouped_ else nodeid


def outcome_of(test: str, phases: Sequence[pytest.TestReport]) -> TestOutcome:
    """The worst of a test's phases, and the first line of what it says."""
    order: tuple[Literal["failed", "skipped"], ...] = ("failed", "skipped")
    for word in order:
        for report in phases:
            if report.outcome == word:
                return TestOutcome(test=test, outcome=word, message=_first_line(report.longrepr))
    return TestOutcome(test=test, outcome="passed")


def _first_line(longrepr: Any) -> str:
    if isinstance(longrepr, tuple):  # a skip: file, line, reason
        text = str(longrepr[2]).removeprefix("Skipped: ")
    else:
        crash = getattr(longrepr, "reprcrash", None)
        text = str(getattr(crash, "message", longrepr))
    return next(iter(text.splitlines()), "")
