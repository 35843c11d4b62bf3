"""The task file: rendered from the ledger, with the notes that somebody typed into it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from replay_lib.errors import SpikeReplayError, UsageError, fault
from replay_lib.record import ledger, notes
from replay_lib.record.history import Attempt, History, history_of
from replay_lib.record.task import Task
from replay_lib.record.task_page import head_of, replay_command, signs_of, state_of, tail_of
from replay_lib.writing import replace_file

LOCK_SECONDS = 60  # rendering takes well under a second


def render(task: Task) -> tuple[str, ...]:
    """Write the task file anew from the ledger; what has to be told, nothing as a rule.

    Notes stay byte for byte. Where their markers are damaged, or another part of the file was
    edited, the old file is kept beside the new one, and that is told. UsageError where the file
    cannot be written; the old one is whole then.
    """
    with _locked(task.file):
        _clear(task.file)
        history = history_of(ledger.read(task))
        old = task.file.read_bytes() if task.file.exists() else b""
        noted = notes.split(old) if old.strip() else notes.Noted(b"\n", touched=False)
        told: tuple[str, ...] = ()
        if noted.touched:
            beside = _keep_beside(task, old)
            told = (_told(task.file, beside, damaged=noted.notes is None),)
        kept = noted.notes if noted.notes is not None else b"\n" + told[0].encode() + b"\n\n"
        content = notes.join(head_of(task, history), kept, tail_of(history))
        if content != old:
            replace_file(task.file, content)
        else:
            task.file.touch()  # it is up to date
    return told


def text_of(task: Task) -> str:
    """The task file as it would be rendered now, notes and all; nothing is written."""
    history = history_of(ledger.read(task))
    old = task.file.read_bytes() if task.file.exists() else b""
    kept = notes.split(old).notes or b""
    return notes.join(head_of(task, history), kept, tail_of(history)).decode(errors="replace")


def render_stale(root: Path = Path()) -> tuple[str, ...]:
    """Render what is older than its ledger, whoever wrote that; what has to be told.

    A ledger that cannot be read, or a file that cannot be written, is told too and raises nothing.
    """
    told: list[str] = []
    for task in ledger.tasks(root):
        try:
            if _is_stale(task) and os.access(task.file.parent, os.W_OK):
                told += render(task)
        except (SpikeReplayError, OSError) as error:
            told.append(str(error))
    return tuple(told)


def _is_stale(task: Task) -> bool:
    written = task.file.stat().st_mtime_ns if task.file.exists() else 0
    return task.ledger.stat().st_mtime_ns >= written


def document(task: Task) -> dict[str, Any]:
    """What the task file tells, as plain data of strict JSON."""
    history = history_of(ledger.read(task))
    end = history.finished
    return {
        "job": task.job,
        "roles": history.roles,
        "state": state_of(history),
        "finished": {"at": end.at.isoformat(), "text": end.text} if end else None,
        "output_directories": list(history.output_directories),
        "active_snapshots": [event.data.get("preserved") for event in history.active],
        "replay_command": replay_command(task, history),
        "experiments": [_attempt(one) for one in history.attempts],
        "commands": [
            {
                "at": one.at.isoformat(),
                "command": one.command,
                "snapshots": list(one.snapshots),
                "state": one.state,
                "exit_code": one.exit_code,
                "seconds": one.seconds,
                "missing": list(one.missing),
                "output": one.output,
            }
            for one in history.commands
        ],
        "observations": [{"at": s.at.isoformat(), "text": s.text} for s in history.observations],
        "next_steps": [{"at": s.at.isoformat(), "text": s.text} for s in history.next_steps],
        "analyzed": [
            {"at": e.at.isoformat(), "snapshot": e.data.get("snapshot"), "signs": signs_of(e)}
            for e in history.analyzed
        ],
        "recorded": [event.data for event in history.recorded],
        "reported": [event.data for event in history.reported],
        "files": _files(task, history),
    }


def _files(task: Task, history: History) -> dict[str, str | None]:
    reports = {"page": task.page, "report": task.report} if history.reported else {}
    files = {"task": task.file, "ledger": task.ledger} | reports
    return {name: str(file) for name, file in files.items()}


def _attempt(one: Attempt) -> dict[str, Any]:
    result = one.result
    return {
        "at": one.at.isoformat(),
        "case": one.case,
        "experiment": one.experiment,
        "under": one.under or None,
        "result": result.as_json() if result else None,
        "code": one.code or None,
        "message": one.message or None,
    }


def _keep_beside(task: Task, content: bytes) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        name = f"{task.job}.edited-{stamp}{f'-{number}' if number else ''}.md"
        beside = task.file.with_name(name)
        if not beside.exists():  # the lock is held: nobody else makes one
            replace_file(beside, content)
            return beside
    raise UsageError(f"{task.file}: a thousand copies were kept in one second")


def _told(file: Path, beside: Path, *, damaged: bool) -> str:
    what = "the markers of its notes were damaged" if damaged else "more than its notes was edited"
    return f"{file}: {what}; the file as it was is kept as {beside.name}"


def _clear(file: Path) -> None:
    """Remove what a killed writer left under a temporary name; the lock is held."""
    temporary = re.compile(rf"\.{re.escape(file.name)}\.[a-z0-9_]{{8}}")
    for one in file.parent.iterdir():
        if temporary.fullmatch(one.name):
            one.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        told = f"its lock {error.lock_file} held for {LOCK_SECONDS} s"
        raise UsageError(fault(file, None, told, "no other writer")) from error
    except OSError as error:
        told = repr(error.strerror or str(error))
        raise UsageError(fault(file, None, told, "a task file that can be written")) from error
