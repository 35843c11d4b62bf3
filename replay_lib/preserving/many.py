"""Preserve one snapshot or all of a root, and keep it in the task's ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replay_lib import layout
from replay_lib.errors import SpikeReplayError, UsageError
from replay_lib.finding.places import Place, snapshots_in
from replay_lib.preserving.keeping import Preserved, preserve
from replay_lib.preserving.placing import Tell, silent
from replay_lib.record import ledger
from replay_lib.record.task import Task
from replay_lib.snapshot.preserved import read_manifest


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One snapshot: what came of it, and the error that ended it or kept it out of the ledger."""

    snapshot: Path
    done: Preserved | None = None
    error: SpikeReplayError | None = None


def task_named(place: Place, named: str | None, root: Path = Path()) -> Task | None:
    """The task of what is preserved: the one named, that of its manifest, or the job above it."""
    if named is not None:
        return Task(named, root)
    if place.only is not None:
        kept = layout.preserved_root(place.only.parent) / place.only.name
        manifest = read_manifest(kept)
        if manifest is not None and manifest.task is not None:
            return Task(manifest.task, root)
    try:
        return None if place.job is None else Task(place.job, root)
    except UsageError:  # a directory's name may hold what no task's name may
        return None


def preserve_each(
    place: Place,
    task: Task | None,
    *,
    verified: bool = False,
    background: bool = False,
    tell: Tell = silent,
    waiting: Callable[[Path], None] = lambda _: None,
) -> list[Attempt]:
    """Preserve every snapshot of ``place``, the lowest step first: it goes first in a rotation.

    One that cannot be preserved does not stop the others. UsageError where there is none.
    """
    wanted = _snapshots(place)
    if not wanted:
        roots = ", ".join(str(root) for root in place.roots)
        raise UsageError(f"{roots}: found no snapshot iter_*, expected one to preserve")
    run = ledger.new_run()
    attempts = []
    for snapshot in wanted:
        done = None
        try:
            done = preserve(
                snapshot,
                task=task.job if task else None,
                role=place.role,
                verified=verified,
                background=background,
                tell=tell,
                waiting=waiting,
            )
            if task is not None:
                keep(task, done, run)
            attempts.append(Attempt(snapshot=snapshot, done=done))
        except SpikeReplayError as error:
            attempts.append(Attempt(snapshot=snapshot, done=done, error=error))
    return attempts


def _snapshots(place: Place) -> list[Path]:
    """The trainer's snapshots, and those that only their preserved copy is left of."""
    if place.only is not None:
        return [place.only]
    wanted: list[Path] = []
    for root in place.roots:
        there = snapshots_in(root)
        names = {path.name for path in there}
        kept = snapshots_in(layout.preserved_root(root))
        wanted += [*there, *(path for path in kept if path.name not in names)]
    return wanted


def keep(task: Task, done: Preserved, run: str) -> None:
    """Append ``preserved``, unless the ledger has it: a killed command may not have come so far."""
    told = str(done.path)
    events = [e for e in ledger.read(task) if e.data.get("preserved") == told]
    if events and events[-1].kind == "preserved":
        return
    ledger.append(
        task,
        "preserved",
        run=run,
        snapshot=str(done.source),
        preserved=told,
        files=len(done.manifest.files),
        bytes=done.manifest.bytes,
        how=done.manifest.how,
    )
