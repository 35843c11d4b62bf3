"""What a ledger says about its task, put in order: the one source of page and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from replay_lib import layout
from replay_lib.analysis.signals.summary import Signals
from replay_lib.record.history import Command, History, Said, history_of
from replay_lib.record.ledger import Event
from replay_lib.record.result import Result
from replay_lib.record.standing import latest
from replay_lib.rule import Verdict


@dataclass(frozen=True)
class Attempt:
    """One experiment that gave a result; ``snapshot`` and ``command`` are those of its run.

    ``under`` names one of two trainers where a command ran both (empty: there was one).
    """

    at: datetime
    host: str
    result: Result
    snapshot: str
    command: str
    under: str = ""

    @property
    def name(self) -> str:
        """As it was asked for, with what it was compared with and under which trainer."""
        against = "" if self.result.against == "baseline" else f" against {self.result.against}"
        under = f" (under {self.under})" if self.under else ""
        return f"{self.result.experiment}{against}{under}"


@dataclass(frozen=True)
class Failure:
    """What gave no result: refused, failed, or lost with a command that never ended."""

    at: datetime
    host: str
    what: str
    code: str
    message: str
    command: str


@dataclass(frozen=True)
class Method:
    """A method that was recorded from this task."""

    at: datetime
    method: str
    card: str
    status: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is reported. ``attempts`` and the rest are oldest first.

    ``outputs``, ``snapshots`` and ``preserved`` (copies, of ``sources``) are paths as written;
    ``analyzed`` are the last readable summaries of ``analyze``, by :func:`same_step`, ``faulty``
    why the last one of a snapshot could not be read.
    """

    job: str
    ledger: Path
    events: tuple[Event, ...]
    outputs: tuple[str, ...]
    snapshots: tuple[str, ...]
    sources: tuple[str, ...]
    preserved: tuple[str, ...]
    released: tuple[str, ...]
    found: tuple[Mapping[str, Any], ...]
    warnings: tuple[Mapping[str, Any], ...]
    attempts: tuple[Attempt, ...]
    failures: tuple[Failure, ...]
    analyzed: Mapping[str, Signals]
    faulty: Mapping[str, str]
    observations: tuple[Said, ...]
    next_steps: tuple[Said, ...]
    methods: tuple[Method, ...]
    commands: tuple[str, ...]
    finished: Said | None

    @property
    def results(self) -> list[Result]:
        """The last result of each experiment on each case, device and dtype.

        Where a command ran two trainers, its results are beside the matter.
        """
        return latest([attempt.result for attempt in self.attempts if not attempt.under])

    @property
    def baselines(self) -> list[Result]:
        """Those of the baseline."""
        return [r for r in self.results if r.is_baseline]

    @property
    def snapshot(self) -> str | None:
        """The selected snapshot: the one that was replayed last, else analyzed, else preserved."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def signals(self) -> Signals | None:
        """Those of the selected snapshot: what another step's data say is not told of this one."""
        return self.signals_of(self.snapshot)

    @property
    def signals_fault(self) -> str | None:
        """Why its last summary could not be read."""
        return None if self.snapshot is None else self.faulty.get(same_step(self.snapshot))

    def signals_of(self, snapshot: str | None) -> Signals | None:
        """The last readable summary of ``snapshot``, or of the copy or the source of it."""
        return None if snapshot is None else self.analyzed.get(same_step(snapshot))

    @property
    def usable(self) -> str | None:
        """The snapshot to name on a command line: its preserved copy where there is one."""
        if self.snapshot is None:
            return None
        told = [e.data for e in self.events if e.kind == "preserved"]
        own = {str(one.get("preserved")) for one in told if one.get("snapshot") == self.snapshot}
        kept = [p for p in self.preserved if p not in self.released]
        mine = [p for p in kept if p in own or same_step(p) == same_step(self.snapshot)]
        return mine[-1] if mine else self.snapshot

    @property
    def last(self) -> datetime | None:
        """When the last event was written."""
        return self.events[-1].at if self.events else None

    def last_results(self) -> list[Result]:
        """Those of the selected snapshot's case alone, as the last result has it."""
        own = [attempt for attempt in self.attempts if not attempt.under]
        if not own:
            return []
        last = own[-1].result
        same = (last.case, last.device, last.dtype)
        return [r for r in self.results if (r.case, r.device, r.dtype) == same]


#: Events about the report itself change nothing that it tells: equal facts give equal pages.
_NOT_TOLD = ("reported",)


def facts_of(job: str, ledger: Path, events: Sequence[Event]) -> Facts:
    """The facts in ``events``; what a newer version wrote and this one cannot read is a failure."""
    told = tuple(event for event in events if event.kind not in _NOT_TOLD)
    history = history_of(told)
    hosts = {event.run: event.host for event in told}
    analyzed, faulty = _analyzed(history)
    preserved = [e for e in told if e.kind == "preserved"]
    found = [e for e in told if e.kind == "found"]
    return Facts(
        job=job,
        ledger=ledger,
        events=told,
        outputs=history.output_directories,
        snapshots=_snapshots(told),
        sources=_texts(preserved, "snapshot"),
        preserved=_texts(preserved, "preserved"),
        released=_released(told),
        found=_listed(found, "snapshots"),
        warnings=_listed(found, "spikes_in_logs"),
        attempts=tuple(_attempts(history, hosts)),
        failures=tuple(_failures(history, hosts)),
        analyzed=analyzed,
        faulty=faulty,
        observations=history.observations,
        next_steps=history.next_steps,
        methods=tuple(
            Method(e.at, *(str(e.data.get(k, "")) for k in ("method", "card", "status")))
            for e in history.recorded
        ),
        commands=tuple(dict.fromkeys(one.command for one in history.commands if one.command)),
        finished=history.finished,
    )


def _attempts(history: History, hosts: Mapping[str, str]) -> Iterable[Attempt]:
    commands = {one.run: one for one in history.commands}
    for one in history.attempts:
        if one.result is not None:
            command = commands.get(one.run)
            snapshot = _snapshot_of(command, one.result.case)
            told = "" if command is None else command.command
            yield Attempt(one.at, hosts[one.run], one.result, snapshot, told, one.under)


def _snapshot_of(command: Command | None, case: str) -> str:
    """Of a command on several cases, the one whose path names the case; empty: none does."""
    snapshots = () if command is None else command.snapshots
    own = [path for path in snapshots if case in Path(path).parts]
    chosen = snapshots if len(snapshots) == 1 else own
    return chosen[0] if len(chosen) == 1 else ""


def _failures(history: History, hosts: Mapping[str, str]) -> list[Failure]:
    """Refused, failed and unreadable ones, and what commands without an end still had to do."""
    commands = {one.run: one for one in history.commands}
    told = []
    for one in history.failures:
        command = commands.get(one.run)
        lost = command is not None and one.experiment is None and one.code == command.state
        what = ", ".join(command.missing) if command is not None and lost else ""
        case = f"{one.case} / " if one.case else ""
        what = what or (f"{case}{one.experiment}" if one.experiment else "the whole command")
        text = "" if command is None else command.command
        told.append(Failure(one.at, hosts[one.run], what, one.code, one.message, text))
    return told


def tally(results: Iterable[Result]) -> list[tuple[Verdict, int]]:
    """How many results of methods have each verdict, the best first."""
    counts = Counter(r.verdict for r in results if not r.is_baseline)
    return sorted(counts.items(), key=lambda pair: pair[0].rank)


def _analyzed(history: History) -> tuple[dict[str, Signals], dict[str, str]]:
    """Of each snapshot the last summary that can be read, and why where the last one cannot."""
    found: dict[str, Signals] = {}
    wrong: dict[str, str] = {}
    for event in history.analyzed:
        place = same_step(str(event.data.get("snapshot")))
        try:
            found[place] = Signals.model_validate(event.data.get("signals"))
            wrong.pop(place, None)
        except ValidationError as error:
            wrong[place] = str(error).splitlines()[0]
    return found, wrong


def same_step(snapshot: str) -> str:
    """One name for a trainer's snapshot and for its preserved copy: the path of the first."""
    path = Path(snapshot)
    return str(layout.source_root(path.parent) / path.name)


def _snapshots(events: Iterable[Event]) -> tuple[str, ...]:
    """Every snapshot that something was done with: those preserved alone, then those used last."""
    kept: dict[str, None] = {}
    used: dict[str, None] = {}
    for event in events:
        if event.kind in ("preserved", "started", "analyzed") and event.data.get("snapshot"):
            path = str(event.data["snapshot"])
            order = kept if event.kind == "preserved" else used
            order.pop(path, None)
            order[path] = None
    return (*(path for path in kept if path not in used), *used)


def _released(events: Iterable[Event]) -> tuple[str, ...]:
    """The copies that are gone: released, and not preserved again after that."""
    gone: dict[str, None] = {}
    for event in events:
        path = str(event.data.get("preserved"))
        if event.kind == "released":
            gone[path] = None
        elif event.kind == "preserved":
            gone.pop(path, None)
    return tuple(gone)


def _texts(events: Iterable[Event], key: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(e.data[key]) for e in events if e.data.get(key)))


def _listed(events: Iterable[Event], key: str) -> tuple[Mapping[str, Any], ...]:
    """Everything that these events list under ``key``, oldest first."""
    return tuple(one for e in events for one in e.data.get(key) or () if isinstance(one, Mapping))


def step_of(path: str | None) -> int | None:
    """The step in a snapshot's path."""
    return None if path is None else layout.step_of(Path(path))
