"""What the pytest plugin does, apart from pytest: sessions of a case, labels, results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replay_lib.case import Case, Needs
from replay_lib.devices import own_devices, unmet
from replay_lib.engine.layout import AUTO, Layout
from replay_lib.engine.machine import cuda_devices
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import CaseError, EngineError, SpikeReplayError, fault
from replay_lib.methods import callable_alone
from replay_lib.patch import Mitigation
from replay_lib.quiet import REFUSALS
from replay_lib.record.baselines import file_of, read_document
from replay_lib.record.drift import compared, environment_of
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result, SideEffect
from replay_lib.record.summary import in_order
from replay_lib.run import Keep, OpenCase, ReplayOptions, parse_experiments

PROPERTY = "spike_replay_result"
NO_CASES = object()


class Sessions:
    """At most one session a device for one case, opened when first needed.

    ``labels`` are the methods that the tests of this case will ask for: the first of them has the
    side effects of all measured on the quiet control, in one session that ends before the spike's
    starts, and then all replayed in one request, where those that change only the loss share a
    forward. A case that cannot be opened is not tried again for its next test. A method that is
    refused, or that a worker dies of, takes no other along: then each test asks for its own.

    ``keep`` is given each result as it arrives, the baseline's too, and each failure.
    """

    def __init__(
        self,
        case: Case,
        options: ReplayOptions,
        labels: Sequence[str] = (),
        keep: Keep = lambda _one: None,
    ) -> None:
        self._case = case
        self._keep = keep
        self._options = options
        self._labels = labels
        self._open: dict[str, OpenCase] = {}
        self._unopenable: dict[str, SpikeReplayError] = {}
        self._asked_all: set[str] = set()
        self._kept_baseline: set[str] = set()
        ranks = 1 if options.layout == AUTO else Layout.parse(options.layout).ranks
        machines = options.nodes.number if options.nodes else 1
        self._size = -(-max(case.needs.devices, ranks) // machines)  # devices taken here at once

    def replay(self, mitigation: str, against: str, device: str) -> Result:
        """The judged result of one experiment on ``device`` (auto, cpu or cuda)."""
        try:
            with own_devices(self._size):
                return self._replay(mitigation, against, _resolved(device))
        except SpikeReplayError as error:
            if not any(error is known for known in self._unopenable.values()):
                self._keep(Refusal(self._case.name, mitigation, error))
            raise

    def _replay(self, mitigation: str, against: str, where: str) -> Result:
        opened = self._opened(where)
        asked = parse_experiments([mitigation], against, opened.methods)
        opened.measure_quiet([*self._all(opened), *asked])
        self._start(where)
        self._replay_all(where)
        try:
            (result,) = opened.results(asked)
        except EngineError:
            opened.close()
            raise
        if where not in self._kept_baseline:
            self._kept_baseline.add(where)
            list(opened.results([Experiment.baseline()]))  # known by now: nothing is replayed
        return result

    def side_effect(self, mitigation: str, device: str) -> SideEffect:
        """What a method does to the quiet control; the spike itself is not replayed for it."""
        opened = self._opened(_resolved(device))
        asked = parse_experiments([mitigation], "baseline", opened.methods)
        with own_devices(self._size):
            opened.measure_quiet([*self._all(opened), *asked])
        effect = opened.quiet.effect(asked[0]) if opened.quiet else None
        if effect is None:
            where = self._case.file or self._case.name
            raise CaseError(fault(where, "quiet", f"none for {mitigation}", "a quiet control"))
        return effect

    def _replay_all(self, where: str) -> None:
        """What the tests will ask for, at once; a fault is told by the test that it belongs to."""
        opened = self._open[where]
        if where in self._asked_all or len(self._labels) < 2:
            return
        self._asked_all.add(where)
        try:
            for _ in opened.results(self._all(opened)):
                pass
        except EngineError:
            opened.close()
            self._start(where)
        except REFUSALS:
            pass

    def _all(self, opened: OpenCase) -> list[Experiment]:
        return parse_experiments(self._labels, "baseline", opened.methods)

    def _opened(self, where: str) -> OpenCase:
        if where not in self._open:
            options = dataclasses.replace(self._options, device=where)
            self._open[where] = OpenCase.open(self._case, options, keep=self._keep)
        return self._open[where]

    def _start(self, where: str) -> None:
        if where in self._unopenable:
            raise self._unopenable[where]
        try:
            self._open[where].start()
        except SpikeReplayError as error:
            self._unopenable[where] = error
            self._keep(Refusal(self._case.name, Experiment.baseline().name, error))
            raise

    def close(self) -> None:
        """End all workers."""
        for opened in self._open.values():
            opened.close()
        self._open.clear()


def _resolved(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if cuda_devices() else "cpu"


def missing_device(needs: Needs, device: str, at_least: int, nodes: int = 1) -> str | None:
    """Why a case cannot run on ``device`` here, with at least so many devices; None if it can."""
    wanted = needs.model_copy(update={"devices": max(needs.devices, at_least)})
    return unmet(wanted, device, nodes)


def mitigation_labels(methods: Mapping[str, Mitigation], cases: Sequence[Case]) -> list[str]:
    """Every slug that needs no parameter, then the combinations and parameters of some case."""
    alone = callable_alone(methods)
    stated = {label for case in cases for label in case.expected}
    return [*alone, *sorted(stated - set(alone) - {"baseline"})]


def checked(result: Result, case: Case, *, compare: bool, digest: bool) -> Result:
    """``result`` with its case's digest, and beside its baseline where ``compare`` is set.

    The files of a case that is not sealed are read for its digest only where there is something to
    compare, or where ``digest`` asks for it.
    """
    if case.file is None:
        return result
    document = read_document(file_of(case.file, environment_of(result))) if compare else None
    known = case.digest() if digest or document is not None or case.sha256 else ""
    if not compare:
        return result.model_copy(update={"case_digest": known})
    return compared(result, document, known)


def results_in(reports: Iterable[Any]) -> list[Result]:
    """Results in the reports of a run; they travel with the reports, also from xdist workers."""
    return in_order(
        Result.model_validate_json(value)
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    )


def absent_snapshot(case: Case) -> str | None:
    """What is said of a case whose snapshot is not on this disk; None where it is."""
    absent = case.missing()
    return None if absent is None else f"{case.name}: no directory {absent}"


def caseless_lines(
    stats: Mapping[str, Iterable[Any]],
    reason: str,
    then: str = "Name a directory of cases with --spike-cases=DIR",
) -> list[str]:
    """How many tests were skipped for ``reason``, there being no case, and what to do about it."""
    told = [getattr(report, "longrepr", None) for report in stats.get("skipped", ())]
    count = sum(isinstance(t, tuple) and t[-1] == f"Skipped: {reason}" for t in told)
    if not count:
        return []
    what = "test that asks for one was" if count == 1 else "tests that ask for one were"
    return [f"{reason}: {count} {what} skipped. {then}; --require-cases makes this an error"]
