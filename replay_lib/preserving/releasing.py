"""``release``: delete a preserved snapshot once nobody needs it any more."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from replay_lib import layout
from replay_lib.errors import SnapshotError, UsageError, fault
from replay_lib.preserving.hashing import LOCKS, locked
from replay_lib.preserving.references import referring
from replay_lib.record import ledger
from replay_lib.record.history import history_of
from replay_lib.record.ledger import Event
from replay_lib.record.task import Task
from replay_lib.snapshot.preserved import Manifest, read_manifest
from replay_lib.unfinished import clear_leftovers, remove_whole

#: What a report tells that was found out by replaying; one from before that is no report of it.
FINDINGS = ("result", "failure", "recorded")


@dataclass(frozen=True, kw_only=True)
class Released:
    """What was deleted: its ``files`` and their ``bytes``, of which ``freed`` had no other name.

    ``before``: it was gone when the command began (killed at the last step, or deleted by hand).
    """

    path: Path
    tasks: tuple[str, ...]
    files: int = 0
    bytes: int = 0
    freed: int = 0
    before: bool = False
    cleared: tuple[Path, ...] = ()


def release(
    preserved: str | Path,
    *,
    task: str | None = None,
    cases: Sequence[Path] = (),
    root: Path = Path(),
) -> Released:
    """Delete the preserved snapshot and append ``released`` to the ledgers of its tasks.

    UsageError with every reason at once where a task of it (``task``, the one in its manifest, and
    each below ``root`` that preserved it) is not finished, has no report or is at work, or where a
    case below one of ``cases`` refers to it, or where somebody put files into it. SnapshotError
    where ``preserved`` was not made by ``preserve``. It is renamed first: a kill leaves it
    preserved or gone.
    """
    place = _place(Path(preserved))
    ours = layout.is_preserved_root(place.parent)  # a trainer's own directory is never written to
    cleared = tuple(clear_leftovers(place.parent)) if ours else ()
    if not place.exists():
        return _gone_before(place, task, root, cleared)
    manifest = _own(place)
    tasks = _tasks(place, manifest, task, root)
    reasons = [*_unfinished(place, tasks), *referring(place, cases), *_added(place, manifest)]
    if reasons:
        told = "".join(f"\n  {reason}" for reason in reasons)
        count = "1 reason" if len(reasons) == 1 else f"{len(reasons)} reasons"
        raise UsageError(f"{place}: it is not released, for {count}:{told}")
    freed = _freed(place, manifest)
    with locked(place):
        try:
            remove_whole(place)
        except OSError as error:
            found = f"a directory that cannot be deleted ({error.strerror or error})"
            raise UsageError(fault(place, None, found, "one of your own")) from error
    _clear_locks(place)
    _tell_ledgers(place, tasks)
    return Released(
        path=place,
        tasks=tuple(one.job for one in tasks),
        files=len(manifest.files),
        bytes=manifest.bytes,
        freed=freed,
        cleared=cleared,
    )


def _place(given: Path) -> Path:
    """Where it lies, whatever links and ``..`` lead there; what is a link itself stays one."""
    return given.parent.resolve() / given.name if given.name not in ("", "..") else given.resolve()


def _own(place: Path) -> Manifest:
    """The manifest; SnapshotError where the directory is not one that ``preserve`` made there."""
    manifest = None if place.is_symlink() else read_manifest(place)
    if manifest is None or not layout.is_preserved_root(place.parent):
        found = "a directory that preserve did not make"
    elif place.stat().st_ino != manifest.inode:
        found = "a copy of a preserved snapshot, made by other means"
    else:
        return manifest
    expected = f"one in {layout.PRESERVED_ROOT}/ with its {layout.PRESERVED_MANIFEST}"
    then = "Nothing else is deleted by this command"
    raise SnapshotError(fault(place, None, found, expected, f"{then}."))


def _tasks(place: Path, manifest: Manifest | None, named: str | None, root: Path) -> list[Task]:
    jobs = [named, manifest.task if manifest else None]
    known = [Task(job, root) for job in jobs if job is not None]
    known += [one for one in ledger.tasks(root) if _preserved_at(ledger.read(one), place) >= 0]
    return list(dict.fromkeys(known))


def _preserved_at(events: Sequence[Event], place: Path) -> int:
    """Number of the last event that preserved ``place``; -1 where none did."""
    numbers = [n for n, e in enumerate(events) if e.kind == "preserved" and _is_of(e, place)]
    return numbers[-1] if numbers else -1


def _last_finding(events: Sequence[Event]) -> int:
    """Number of the last event that a report tells as a finding; -1 where there is none."""
    return max((n for n, e in enumerate(events) if e.kind in FINDINGS), default=-1)


def _is_of(event: Event, place: Path) -> bool:
    """Whether ``event`` tells of ``place``, whatever links its name led through."""
    told = event.data.get("preserved")
    return isinstance(told, str) and _place(Path(told)) == place


def _unfinished(place: Path, tasks: Sequence[Task]) -> Iterator[str]:
    if not tasks:
        yield "no task is known that it belongs to: name it with --task JOB"
    for task in tasks:
        events = ledger.read(task)
        since = events[max(_preserved_at(events, place), _last_finding(events)) + 1 :]
        if history_of(events).finished is None:  # or something was begun after that
            yield f"the task {task.job} is not finished: spike-replay task finish {task.job}"
        reports = [event for event in since if event.kind == "reported"]
        if not reports:
            before = any(event.kind == "reported" for event in events)
            how = "older than the last that was done" if before else "not written"
            yield f"the report of task {task.job} is {how}: spike-replay report {task.job}"
        elif not _is_there(reports[-1], task):
            yield f"the report of task {task.job} is gone: spike-replay report {task.job}"
        for run in _at_work(events):
            yield f"a command of task {task.job} is at work (process {run.pid})"


def _added(place: Path, manifest: Manifest) -> Iterator[str]:
    """Files that were not preserved: deleting them would lose somebody's only copy."""
    found = (path.relative_to(place) for path in place.rglob("*") if not path.is_dir())
    own = (layout.PRESERVED_MANIFEST, f".{layout.PRESERVED_MANIFEST}")  # and what it was written by
    added = sorted(
        str(path)
        for path in found
        if str(path) not in manifest.files and not str(path).startswith(own)
    )
    if added:
        more = f" and {len(added) - 5} more" if len(added) > 5 else ""
        yield f"it holds what was not preserved, move it away: {', '.join(added[:5])}{more}"


def _is_there(reported: Event, task: Task) -> bool:
    told = (reported.data.get(name) for name in ("report", "page"))
    paths = [Path(path) for path in told if isinstance(path, str)]
    return bool(paths) and all((task.root / path).is_file() or path.is_file() for path in paths)


def _at_work(events: Sequence[Event]) -> list[Event]:
    """Runs that began here, did not end, and whose process lives."""
    ended = {event.run for event in events if event.kind == "ended"}
    begun = [e for e in events if e.kind == "started" and e.run not in ended]
    return [e for e in begun if e.host == socket.gethostname() and _lives(e)]


def _lives(started: Event) -> bool:
    """Whether the process is that one: numbers are given again, to processes that began later."""
    with suppress(psutil.Error):
        return psutil.Process(started.pid).create_time() <= started.at.timestamp() + 1
    return False


def _freed(place: Path, manifest: Manifest) -> int:
    """Bytes of files that have no other name: the rest stays where it is linked."""
    size = 0
    for name in manifest.files:
        with suppress(OSError):
            stat = (place / name).stat()
            size += stat.st_size if stat.st_nlink == 1 else 0
    return size


def _clear_locks(place: Path) -> None:
    """Nothing is left of it; a root that holds nothing else goes too."""
    locks = place.parent / LOCKS
    with suppress(OSError):
        for lock in locks.glob(f"{place.name}.*"):
            lock.unlink()
        locks.rmdir()
        place.parent.rmdir()


def _gone_before(place: Path, named: str | None, root: Path, cleared: tuple[Path, ...]) -> Released:
    """A release that was killed before it came to the ledger is told there now."""
    waiting = []
    for task in _tasks(place, None, named, root):
        events = ledger.read(task)
        since = events[_preserved_at(events, place) :]
        if since and not any(e.kind == "released" and _is_of(e, place) for e in since):
            waiting.append(task)
    if not waiting:
        expected = "a preserved snapshot"
        raise UsageError(fault(place, None, "no such directory", expected))
    _tell_ledgers(place, waiting)
    names = tuple(task.job for task in waiting)
    return Released(path=place, tasks=names, before=True, cleared=cleared)


def _tell_ledgers(place: Path, tasks: Sequence[Task]) -> None:
    run = ledger.new_run()
    for task in tasks:
        events = ledger.read(task)
        at = _preserved_at(events, place)
        told = str(place) if at < 0 else events[at].data["preserved"]  # the name that it has there
        ledger.append(task, "released", run=run, preserved=told)
