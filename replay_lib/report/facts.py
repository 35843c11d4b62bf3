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
from replay_lib.record.ledger import Event
from replay_lib.record.result import Result
from replay_lib.record.standing import latest
from replay_lib.rule import Verdict


@dataclass(frozen=True)
class Attempt:
    """One experiment that gave a result; ``snapshot`` and ``command`` are those of its run."""

    at: datetime
    host: str
    result: Result
    snapshot: str
    command: str

    @property
    def name(self) -> str:
        """As it was asked for, with what it was compared with."""
        against = self.result.against
        told = self.result.experiment
        return told if against == "baseline" else f"{told} against {against}"


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
class Note:
    """Something written down by a person or a command."""

    at: datetime
    text: str


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
    ``signals`` is the last readable summary of ``analyze``, ``signals_fault`` why the last one
    could not be read.
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
    signals: Signals | None
    signals_fault: str | None
    observations: tuple[Note, ...]
    next_steps: tuple[Note, ...]
    methods: tuple[Method, ...]
    commands: tuple[str, ...]
    finished: Note | None

    @property
    def results(self) -> list[Result]:
        """The last result of each experiment on each case, device and dtype."""
        return latest([attempt.result for attempt in self.attempts])

    @property
    def baselines(self) -> list[Result]:
        """Those of the baseline."""
        return [r for r in self.results if r.is_baseline]

    @property
    def snapshot(self) -> str | None:
        """The selected snapshot: the one that was replayed last, else analyzed, else preserved."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def usable(self) -> str | None:
        """The snapshot to name on a command line: its preserved copy where there is one."""
        kept = [p for p in self.preserved if p not in self.released]
        return kept[-1] if kept else self.snapshot

    @property
    def last(self) -> datetime | None:
        """When the last event was written."""
        return self.events[-1].at if self.events else None

    def last_results(self) -> list[Result]:
        """Those of the selected snapshot's case alone, as the last result has it."""
        if not self.attempts:
            return []
        last = self.attempts[-1].result
        same = (last.case, last.device, last.dtype)
        return [r for r in self.results if (r.case, r.device, r.dtype) == same]


#: Events about the report itself change nothing that it tells: equal facts give equal pages.
_NOT_TOLD = ("reported",)


def facts_of(job: str, ledger: Path, events: Sequence[Event]) -> Facts:
    """The facts in ``events``; what a newer version wrote and this one cannot read is a failure."""
    told = tuple(event for event in events if event.kind not in _NOT_TOLD)
    starts = {e.run: e for e in told if e.kind == "started"}
    attempts, unreadable = _attempts(told, starts)
    signals, signals_fault = _signals(told)
    kinds = _by_kind(told)
    failures = [*unreadable, *(_failure(e, starts) for e in kinds.get("failure", ()))]
    failures += _lost(told, starts, attempts)
    return Facts(
        job=job,
        ledger=ledger,
        events=told,
        outputs=_outputs(kinds.get("found", ())),
        snapshots=_snapshots(told),
        sources=_texts(kinds.get("preserved", ()), "snapshot"),
        preserved=_texts(kinds.get("preserved", ()), "preserved"),
        released=_texts(kinds.get("released", ()), "preserved"),
        found=_listed(kinds.get("found", ()), "snapshots"),
        warnings=_listed(kinds.get("found", ()), "spikes_in_logs"),
        attempts=tuple(attempts),
        failures=tuple(sorted(failures, key=lambda one: one.at)),
        signals=signals,
        signals_fault=signals_fault,
        observations=_notes(kinds.get("observation", ())),
        next_steps=_notes(kinds.get("next_step", ())),
        methods=tuple(
            Method(e.at, *(str(e.data.get(k, "")) for k in ("method", "card", "status")))
            for e in kinds.get("recorded", ())
        ),
        commands=tuple(dict.fromkeys(_command(e) for e in starts.values())),
        finished=next(iter(_notes(kinds.get("finished", ())[-1:])), None),
    )


def tally(results: Iterable[Result]) -> list[tuple[Verdict, int]]:
    """How many results of methods have each verdict, the best first."""
    counts = Counter(r.verdict for r in results if not r.is_baseline)
    return sorted(counts.items(), key=lambda pair: pair[0].rank)


def _by_kind(events: Iterable[Event]) -> dict[str, list[Event]]:
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(event.kind, []).append(event)
    return kinds


def _attempts(
    events: Iterable[Event], starts: Mapping[str, Event]
) -> tuple[list[Attempt], list[Failure]]:
    read, unreadable = [], []
    for event in events:
        if event.kind != "result":
            continue
        start = starts.get(event.run)
        try:
            result = _result(event.data.get("result"))
        except (ValidationError, AttributeError) as error:
            told = str(error).splitlines()[0]
            what = "a result that this version cannot read"
            unreadable.append(_failed(event, start, what, "unreadable", told))
            continue
        snapshot = "" if start is None else str(start.data.get("snapshot", ""))
        read.append(Attempt(event.at, event.host, result, snapshot, _command(start)))
    return read, unreadable


def _result(document: Any) -> Result:
    """Keys that this version does not know, and those derived from others, are passed over."""
    return Result.model_validate({k: v for k, v in document.items() if k in Result.model_fields})


def _signals(events: Iterable[Event]) -> tuple[Signals | None, str | None]:
    found, wrong = None, None
    for event in events:
        if event.kind == "analyzed":
            try:
                found, wrong = Signals.model_validate(event.data.get("signals")), None
            except ValidationError as error:
                wrong = str(error).splitlines()[0]
    return found, wrong


def _failure(event: Event, starts: Mapping[str, Event]) -> Failure:
    what = event.data.get("experiment")
    told = [str(event.data.get(key, "")) for key in ("code", "message")]
    return _failed(event, starts.get(event.run), str(what or "the whole command"), *told)


def _failed(event: Event, start: Event | None, what: str, code: str, message: str) -> Failure:
    return Failure(event.at, event.host, what, code, message, _command(start))


def _lost(
    events: Sequence[Event], starts: Mapping[str, Event], attempts: Sequence[Attempt]
) -> list[Failure]:
    """Runs that began and never ended, with those of their experiments that gave nothing."""
    ended = {e.run for e in events if e.kind == "ended"}
    lost = []
    for run, start in starts.items():
        if run in ended:
            continue
        own = [e for e in events if e.run == run]
        done = {str(e.data["result"].get("experiment")) for e in own if e.kind == "result"}
        done |= {_bare(str(e.data.get("experiment"))) for e in own if e.kind == "failure"}
        left = [str(p) for p in start.data.get("planned") or () if _bare(str(p)) not in done]
        what = ", ".join(left) or "the whole command"
        message = "no end was written: it was killed, or still runs"
        lost.append(_failed(own[-1], start, what, "no_end", message))
    return lost


def _bare(experiment: str) -> str:
    """Without the case before it, which some events name."""
    return experiment.rpartition(" / ")[2]


def _command(start: Event | None) -> str:
    if start is None:
        return ""
    command = start.data.get("command", "")
    return " ".join(map(str, command)) if isinstance(command, list) else str(command)


def _outputs(events: Sequence[Event]) -> tuple[str, ...]:
    """Of the last look that found any."""
    for event in reversed(events):
        listed = event.data.get("output_directories") or ()
        found = [str(o.get("path", o)) if isinstance(o, Mapping) else str(o) for o in listed]
        if found:
            return tuple(found)
    return ()


def _snapshots(events: Iterable[Event]) -> tuple[str, ...]:
    """Every snapshot that something was done with, the one that was used last at the end."""
    order: dict[str, None] = {}
    for event in events:
        if event.kind in ("preserved", "started", "analyzed") and event.data.get("snapshot"):
            path = str(event.data["snapshot"])
            order.pop(path, None)
            order[path] = None
    return tuple(order)


def _texts(events: Iterable[Event], key: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(e.data[key]) for e in events if e.data.get(key)))


def _notes(events: Iterable[Event]) -> tuple[Note, ...]:
    return tuple(Note(e.at, str(e.data.get("text", ""))) for e in events)


def _listed(events: Iterable[Event], key: str) -> tuple[Mapping[str, Any], ...]:
    """Everything that these events list under ``key``, oldest first."""
    return tuple(one for e in events for one in e.data.get(key) or () if isinstance(one, Mapping))


def step_of(path: str | None) -> int | None:
    """The step in a snapshot's path."""
    return None if path is None else layout.step_of(Path(path))
