"""What the pytest plugin does, apart from pytest: sessions of a case, labels, the summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replay_lib.case import Case, Needs
from replay_lib.devices import cuda_devices, unmet
from replay_lib.errors import EngineError, SpikeReplayError
from replay_lib.patch import Mitigation
from replay_lib.record.result import Result
from replay_lib.record.table import plain_table
from replay_lib.run import OpenCase, ReplayOptions, parse_experiments

PROPERTY = "spike_replay_result"
NO_CASES = object()


class Sessions:
    """At most one session a device for one case, opened when first needed.

    A case that cannot be opened is not tried again for its next test. A worker that died in one
    experiment is replaced: one bad method must not turn all others red.
    """

    def __init__(self, case: Case, options: ReplayOptions) -> None:
        self._case = case
        self._options = options
        self._open: dict[str, OpenCase] = {}
        self._unopenable: dict[str, SpikeReplayError] = {}

    def replay(self, mitigation: str, against: str, device: str) -> Result:
        """The judged result of one experiment on ``device`` (auto, cpu or cuda)."""
        where = _resolved(device)
        opened = self._opened(where)
        try:
            (result,) = opened.results(parse_experiments([mitigation], against, opened.methods))
        except EngineError:
            self._open.pop(where).close()
            raise
        return result

    def _opened(self, where: str) -> OpenCase:
        if where in self._unopenable:
            raise self._unopenable[where]
        if where not in self._open:
            options = dataclasses.replace(self._options, device=where)
            try:
                self._open[where] = OpenCase.open(self._case, options)
            except SpikeReplayError as error:
                self._unopenable[where] = error
                raise
        return self._open[where]

    def close(self) -> None:
        """End all workers."""
        for opened in self._open.values():
            opened.close()
        self._open.clear()


def _resolved(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if cuda_devices() else "cpu"


def missing_device(needs: Needs, device: str, at_least: int) -> str | None:
    """Why a case cannot run on ``device`` here, with at least so many devices; None if it can."""
    wanted = needs.model_copy(update={"devices": max(needs.devices, at_least)})
    return unmet(wanted, device)


def mitigation_labels(methods: Mapping[str, Mitigation], cases: Sequence[Case]) -> list[str]:
    """Every registered slug, then the combinations and parameters that some case expects."""
    stated = {label for case in cases for label in case.expected}
    return [*methods, *sorted(stated - set(methods) - {"baseline"})]


def collect_results(stats: Mapping[str, Iterable[Any]]) -> list[Result]:
    """Results in the reports of a run; they travel with the reports, also from xdist workers."""
    found: dict[str, Result] = {}
    for reports in stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for name, value in report.user_properties:
                if name == PROPERTY:
                    found[f"{report.nodeid} {len(found)}"] = Result.model_validate_json(value)
    return sorted(found.values(), key=lambda r: (r.case, r.device, not r.is_baseline, r.experiment))


def summary_lines(results: Sequence[Result]) -> list[str]:
    """The table of verdicts, then whatever is better or worse than expected, with its reason."""
    if not results:
        return []
    lines = plain_table(results).splitlines()
    return lines + [r.explain() for r in results if r.comparison != "as expected"]
