"""What the events of a ledger come to: commands, attempts, what is preserved, what was noted.

Pure functions of events, but for one question: whether a command's process still lives.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from replay_lib import layout
from replay_lib.record.ledger import Event
from replay_lib.record.result import Result
from replay_lib.record.results_file import result_from

RUNNING, UNKNOWN = "still running", "killed or still running"
CLOCK_SECONDS = (
    2.0  # how far a process's start, told in clock ticks, may lie behind its first event
)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One experiment that was tried, or one command that failed as a whole.

    ``result`` is None where it was refused, failed, or was written by a version whose results this
    one cannot read; then ``code`` and ``message`` say so. ``under`` names one of two trainers
    (empty: there was one). ``experiment`` is None for a whole command.
    """

    at: datetime
    run: str
    case: str = ""
    experiment: str | None = None
    under: str = ""
    result: Result | None = None
    code: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command; ``state`` is ``ended``, ``still running`` or ``killed or still running``.

    ``missing`` are the planned experiments that neither gave a result nor were refused.
    """

    run: str
    at: datetime
    command: str
    snapshots: tuple[str, ...]
    planned: tuple[str, ...]
    missing: tuple[str, ...]
    output: str
    state: str
    exit_code: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Said:
    """Something said about a task: an observation, a next step, the end."""

    at: datetime
    text: str


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything in the order in which it happened. ``finished`` is None while there is work."""

    commands: tuple[Command, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    output_directories: tuple[str, ...] = ()
    active: tuple[Event, ...] = ()  # ``preserved``, and not released since
    observations: tuple[Said, ...] = ()
    next_steps: tuple[Said, ...] = ()
    analyzed: tuple[Event, ...] = ()
    recorded: tuple[Event, ...] = ()
    reported: tuple[Event, ...] = ()
    finished: Said | None = None

    @property
    def roles(self) -> list[str]:
        """Roles that the names of the output directories state, each once."""
        named = [layout.job_and_role(Path(text).name) for text in self.output_directories]
        return list(dict.fromkeys(found[1] for found in named if found))

    @property
    def results(self) -> list[Result]:
        """All results."""
        return [one.result for one in self.attempts if one.result is not None]

    @property
    def failures(self) -> list[Attempt]:
        """What gave no result: refused experiments, failed and killed commands."""
        return [one for one in self.attempts if one.result is None]


def history_of(events: Sequence[Event]) -> History:
    """What ``events`` come to, in the order of their time; what an event lacks is left out."""
    events = sorted(events, key=lambda event: event.at)  # ledgers of two people may be merged
    commands = _commands(events)
    return History(
        commands=tuple(commands),
        attempts=tuple(_attempts(events, commands)),
        output_directories=tuple(dict.fromkeys(_output_directories(events))),
        active=tuple(_active(events)),
        observations=_said(events, "observation"),
        next_steps=_said(events, "next_step"),
        analyzed=_of(events, "analyzed"),
        recorded=_of(events, "recorded"),
        reported=_of(events, "reported"),
        finished=_finished(events),
    )


def _of(events: Iterable[Event], *kinds: str) -> tuple[Event, ...]:
    return tuple(event for event in events if event.kind in kinds)


def _said(events: Sequence[Event], kind: str) -> tuple[Said, ...]:
    return tuple(Said(one.at, _text(one.data.get("text"))) for one in _of(events, kind))


def _finished(events: Sequence[Event]) -> Said | None:
    """The last ``finished``, unless something was begun or asked for after it."""
    last = _of(events, "finished", "started", "preserved", "next_step")[-1:]
    return next(iter(_said(last, "finished")), None)


def _active(events: Sequence[Event]) -> list[Event]:
    found: dict[str, Event] = {}
    for event in _of(events, "preserved", "released"):
        place = _text(event.data.get("preserved"))
        found.pop(place, None)
        if event.kind == "preserved":
            found[place] = event
    return list(found.values())


def _output_directories(events: Sequence[Event]) -> Iterable[str]:
    """Those that ``find`` saw, and those above the snapshots that anything was done with."""
    for event in events:
        yield from _texts(event.data.get("output_directories"))
        places = [event.data.get("preserved"), event.data.get("snapshot")]
        for place in [*places, *_listed(event.data.get("snapshots"))]:
            above = layout.output_directory(Path(place)) if isinstance(place, str) else None
            if above is not None:
                yield str(above)


def _commands(events: Sequence[Event]) -> list[Command]:
    return [
        _command(event, [one for one in events if one.run == event.run])
        for event in _of(events, "started")
    ]


def _command(started: Event, events: Sequence[Event]) -> Command:
    ended = next(iter(_of(events, "ended")), None)
    planned = _texts(started.data.get("planned"))
    reached = {one.experiment for one in _experiments(events)}
    snapshots = _texts(started.data.get("snapshots")) or _texts([started.data.get("snapshot")])
    return Command(
        run=started.run,
        at=started.at,
        command=" ".join(_text(started.data.get("command")).split("\n")),
        snapshots=tuple(snapshots),
        planned=tuple(planned),
        missing=tuple(name for name in planned if name not in reached),
        output=_text(started.data.get("output")),
        state="ended" if ended else RUNNING if _lives(started) else UNKNOWN,
        exit_code=ended.data.get("exit_code") if ended else None,
        seconds=ended.data.get("seconds") if ended else None,
    )


def _lives(started: Event) -> bool:
    """Whether the process that wrote ``started`` is on this host and lives."""
    if started.host != socket.gethostname():
        return False
    try:
        began = psutil.Process(started.pid).create_time()
    except psutil.Error:
        return False
    # a later process may have got the number of a dead one
    return began <= started.at.timestamp() + CLOCK_SECONDS


def _attempts(events: Sequence[Event], commands: Sequence[Command]) -> list[Attempt]:
    """Results, refusals and failures as they fell; a killed command stands at its last event."""
    found = list(_experiments(events))
    for command in commands:
        if command.state == UNKNOWN:
            last = max(event.at for event in events if event.run == command.run)
            found.append(Attempt(at=last, run=command.run, code=UNKNOWN, message=_left(command)))
    return sorted(found, key=lambda one: one.at)


def _left(command: Command) -> str:
    done = len(command.planned) - len(command.missing)
    return f"{done} of {len(command.planned)} planned experiments are known"


def _experiments(events: Iterable[Event]) -> Iterable[Attempt]:
    for event in _of(events, "result", "failure"):
        under = _text(event.data.get("under"))
        if event.kind == "failure":
            case, _, name = _text(event.data.get("experiment")).rpartition(" / ")
            yield Attempt(
                at=event.at,
                run=event.run,
                case=case,
                experiment=name or None,
                under=under,
                code=_text(event.data.get("code")),
                message=_text(event.data.get("message")),
            )
        else:
            yield _attempt(event, under)


def _attempt(event: Event, under: str) -> Attempt:
    raw = event.data.get("result")
    plain: dict[str, Any] = raw if isinstance(raw, dict) else {}
    result: Result | None = None
    message = ""
    try:
        result = result_from(plain)
    except ValidationError as error:
        message = f"another version wrote this result: {error.error_count()} fields differ"
    return Attempt(
        at=event.at,
        run=event.run,
        case=_text(plain.get("case")),
        experiment=_text(plain.get("experiment")) or "?",
        under=under,
        result=result,
        code="" if result else "unreadable",
        message=message,
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _texts(value: object) -> list[str]:
    """The texts of a list; of an object its path."""
    found = [one.get("path") if isinstance(one, dict) else one for one in _listed(value)]
    return [one for one in found if isinstance(one, str)]
