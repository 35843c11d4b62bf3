"""``find``: a job's snapshots, what its logs tell, and what happened to each spike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from replay_lib import layout
from replay_lib.finding.logs import LogRead, check_log, copy_log, logs_in, read_log
from replay_lib.finding.places import Place, locate
from replay_lib.finding.rows import Row, rows_of
from replay_lib.record.task import Task
from replay_lib.unfinished import leftovers

Fate = Literal["on disk", "preserved", "rotated away", "absent", "another"]

#: What each fate of a spike that a log tells of means.
MEANS: dict[Fate, str] = {
    "on disk": "its snapshot is there",
    "preserved": "rotated away by the trainer, but preserved before",
    "rotated away": "the trainer deleted its snapshot to make room for later ones",
    "absent": "not there although lower steps are: never written whole, or deleted by hand",
    "another": "there is a snapshot of this step with another norm: the run came by it twice",
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """A spike that a log tells of, and what became of its snapshot."""

    step: int
    norm: str
    at: str
    lines: int
    log: Path
    fate: Fate


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is. ``logs`` were read, ``unread`` lie in the output directory.

    ``output`` is where the logs were copied to, None where none was given. ``leftovers`` are
    hidden directories of killed commands; the next ``preserve`` or ``release`` there removes them.
    """

    place: Place
    rows: tuple[Row, ...]
    logs: tuple[LogRead, ...]
    told: tuple[Told, ...]
    unread: tuple[Path, ...]
    output: Path | None
    leftovers: tuple[Path, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        place = self.place
        return {
            "target": place.target,
            "job": place.job,
            "role": place.role,
            "output_directory": str(place.output) if place.output else None,
            "roots": [str(root) for root in place.roots],
            "snapshots": [row.as_json() for row in self.rows],
            "max_snapshots": next((r.max_snapshots for r in reversed(self.rows)), None),
            "spikes_in_logs": [
                {**vars(one), "log": str(one.log), "means": MEANS[one.fate]} for one in self.told
            ],
            "logs": [
                {
                    "log": str(log.path),
                    "bytes": log.bytes,
                    "cut": log.cut,
                    "non_finite_steps": log.non_finite_steps,
                }
                for log in self.logs
            ],
            "logs_not_read": [str(path) for path in self.unread],
            "copied_to": str(self.output) if self.output else None,
            "leftovers": [str(path) for path in self.leftovers],
            "notes": list(place.notes),
        }


def find(
    target: str,
    outputs: Sequence[Path] = (),
    role: str | None = None,
    logs: Sequence[Path] = (),
    *,
    every_log: bool = False,
    root: Path = Path(),
) -> Found:
    """Look for the snapshots of ``target`` (see :func:`~replay_lib.finding.places.locate`).

    ``logs`` are copied below ``root`` into the output directory of the job's task, and read there;
    ``every_log`` takes those in the output directory too. UsageError where the target is not one
    place, or a log cannot be read.
    """
    place = locate(target, outputs, role)
    for log in logs:
        check_log(log)
    rows = [row for each in place.roots for row in rows_of(each, place.only)]
    near = logs_in(place.output) if place.output else []
    chosen = list(dict.fromkeys([*logs, *(near if every_log else [])]))
    output = Task(_task_name(place), root).output() if chosen else None
    read = [read_log(copy_log(log, output), log) for log in chosen] if output else []
    return Found(
        place=place,
        rows=tuple(rows),
        logs=tuple(read),
        told=tuple(_told(read, rows)),
        unread=tuple(path for path in near if path not in chosen),
        output=output,
        leftovers=tuple(p for r in place.roots for p in leftovers(layout.preserved_root(r))),
    )


def _task_name(place: Place) -> str:
    """The job; where none is known, the directory's name in letters that a task's name has."""
    named = place.job or (place.output or place.roots[0]).name
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._+=@-]", "-", named).lstrip("-._+=@")[:200] or "find"


def _told(logs: Sequence[LogRead], rows: Sequence[Row]) -> list[Told]:
    return [
        Told(
            step=one.step,
            norm=one.norm,
            at=one.at,
            lines=one.lines,
            log=log.path,
            fate=_fate(one.step, one.norm, rows),
        )
        for log in logs
        for one in log.mentions
    ]


def _fate(step: int, norm: str, rows: Sequence[Row]) -> Fate:
    row = next((row for row in rows if row.step == step), None)
    if row is not None:
        kept = row.grad_norm_preclip
        if kept is not None and f"{kept:.4f}" != norm:
            return "another"
        return "on disk" if row.path is not None else "preserved"
    there = [row.step for row in rows if row.path is not None]
    # the lowest steps go first: one that is missing above a lower one did not go that way
    return "absent" if there and step > min(there) else "rotated away"
