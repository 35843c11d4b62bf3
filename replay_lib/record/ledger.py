"""The ledger of a task: append-only JSON lines, one event a line, locked and flushed.

Everything that is told about a task (task file, report, cards) is rendered from it. An event is
written whole or not at all: a line that a killed writer left unfinished is no event, and is cut off
by the next writer.

=============== ================================================================================
kind            data
=============== ================================================================================
``found``       ``target``, ``output_directories``, ``snapshots``, ``spikes_in_logs``: what ``find``
                saw
``preserved``   ``snapshot`` (the source), ``preserved`` (the copy), ``files``, ``bytes``, ``how``
``released``    ``preserved``
``started``     ``command``, ``snapshot`` (the first one), ``snapshots``, ``planned`` (names of
                experiments), ``output``
``result``      ``result``: one :class:`~replay_lib.record.result.Result` as JSON; ``under`` where
                a command runs two trainers: which
``failure``     ``experiment`` as ``case / name`` (None: the whole command), ``code``, ``message``;
                ``under`` as of ``result``
``ended``       ``exit_code``, ``seconds``
``analyzed``    ``snapshot``, ``signals``: the summary of ``analyze``
``observation`` ``text``
``next_step``   ``text``
``recorded``    ``method``, ``card``, ``status``, ``experiment``, ``rationale``
``reported``    ``page``, ``report`` (paths), ``sha256`` of the page
``finished``    ``text``: nothing more is to be done
=============== ================================================================================

Events of one command have one ``run``. A run with ``started`` and no ``ended`` still goes on, or
was killed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from filelock import FileLock, Timeout
from pydantic import AwareDatetime, Field, ValidationError

from replay_lib import layout
from replay_lib.engine.protocol import Frozen
from replay_lib.errors import UsageError, fault
from replay_lib.record.task import Task

LOCK_SECONDS = 60  # an append takes milliseconds; a minute of waiting means a stuck writer


class Event(Frozen):
    """One line. ``at`` is UTC with a time zone, ``run`` joins the events of one command.

    ``at`` is never before that of the event above it when it was written: events are told in the
    order of their time, and clocks differ between hosts, or are set back.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    at: AwareDatetime
    host: str
    pid: int
    run: str
    kind: str
    data: dict[str, Any] = Field(default_factory=dict)


def new_run() -> str:
    """A name for the events of one command."""
    return uuid4().hex[:12]


def append(task: Task, kind: str, *, run: str | None = None, **data: Any) -> Event:
    """Write one event at the end of the ledger and flush it; the ledger is created if absent.

    ``data`` has to be JSON without NaN (a Result's ``as_json()`` is). Raises UsageError where the
    ledger cannot be written, or is locked by another writer for a minute.
    """
    event = Event(
        at=datetime.now(UTC),
        host=socket.gethostname(),
        pid=os.getpid(),
        run=run or new_run(),
        kind=kind,
        data=data,
    )
    _line(event)  # what is no JSON is told before anything is locked
    with _open(task.ledger) as file:
        _cut_unfinished(file)
        before = _last_time(file)
        if before is not None and before > event.at:
            event = event.model_copy(update={"at": before})
        _write_whole(file, _line(event))
    return event


def _line(event: Event) -> bytes:
    text = json.dumps(event.model_dump(mode="json", by_alias=True), allow_nan=False)
    return f"{text}\n".encode()


def read(task: Task) -> tuple[Event, ...]:
    """All events, oldest first; none where the task has no ledger.

    UsageError names the line that is no event. An unfinished last line is no event.
    """
    file = task.ledger
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        told = repr(error.strerror or str(error))
        raise UsageError(fault(file, None, told, "a ledger that can be read")) from error
    whole = enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1)
    return tuple(_parse(file, number, line) for number, line in whole if line.strip())


def tasks(root: Path = Path()) -> list[Task]:
    """Every task that has a ledger under ``root``, by name."""
    found = sorted((root / layout.TASKS).glob("[A-Za-z0-9]*.jsonl"))
    return [Task(file.stem, root) for file in found if file.is_file()]


@contextmanager
def _open(file: Path) -> Iterator[int]:
    """A file descriptor of ``file``, locked, positioned at its end."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_SECONDS):
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                yield handle
            finally:
                os.close(handle)
    except Timeout as error:
        told = f"its lock {error.lock_file} held for {LOCK_SECONDS} s"
        raise UsageError(fault(file, None, told, "no other writer")) from error
    except NotImplementedError as error:  # what filelock says of a file system without locks
        told, then = "a file system without locks", "Work in a directory on a local disk"
        raise UsageError(fault(file, None, told, "one with locks", then)) from error
    except OSError as error:
        told = error.strerror or str(error)
        raise UsageError(fault(file, None, repr(told), "a ledger that can be written")) from error


def _write_whole(file: int, content: bytes) -> None:
    """Write all of ``content`` and flush it, or leave the file as it was: a disk may be full."""
    size = os.fstat(file).st_size
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise


def _cut_unfinished(file: int) -> None:
    """Drop what follows the last newline: its writer was killed."""
    size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return
    content = os.pread(file, size, 0)
    os.ftruncate(file, content.rfind(b"\n") + 1)


def _last_time(file: int) -> datetime | None:
    """When the last event was written; None where there is none, or none that can be read."""
    size, block = os.fstat(file).st_size, 1 << 16
    while True:
        start = max(size - block, 0)
        tail = os.pread(file, size - start, start).rstrip()
        if start == 0 or b"\n" in tail:
            break
        block *= 4
    try:
        return Event.model_validate_json(tail.rpartition(b"\n")[2]).at
    except ValidationError:
        return None


def _parse(file: Path, number: int, line: bytes) -> Event:
    place, then = f"line {number}", "Mend that line, or take it out"
    try:
        raw: Any = json.loads(line)
        return Event.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place += "".join(f": {part}" for part in first["loc"])
        found = f"{first['input']!r:.80}"
        if first["loc"] == ("schema",) and isinstance(first["input"], int):
            then = "A newer version of this package wrote it: take that one"
        raise UsageError(
            fault(file, place, found, f"one event of a ledger ({first['msg']})", then)
        ) from error
    except (ValueError, RecursionError) as error:
        found = f"what is no JSON ({str(error).splitlines()[0]:.80})"
        raise UsageError(fault(file, place, found, "one event of a ledger", then)) from error
