"""What would stop a session anyway, told before its worker starts. No torch.

A worker takes 8 s to start on a CPU and 15 s on a GPU node, and a sealed case is hashed before
that. Only what is certain is refused here; the worker checks all of it again.
"""

from __future__ import annotations

import os
from pathlib import Path

from replay_lib.engine.machine import has_cuda
from replay_lib.errors import UsageError, fault
from replay_lib.snapshot.imported import not_to_replay
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.reader import reader_of
from replay_lib.trainers.findable import check_findable

RECORDED = "recorded"


def check_before_start(snapshot: Path | str, *, device: str, rows: str, trainer: str) -> str:
    """The device that a session will take: cpu or cuda.

    UsageError for a device that is not here and for rows that ``snapshot`` does not have, errors of
    the trainer as of :func:`check_findable`; those of opening the snapshot pass.
    """
    check_findable(trainer)
    refuse_imported(Path(snapshot))
    found = resolve_device(device)
    check_rows(Path(snapshot), rows)
    return found


def refuse_imported(snapshot: Path) -> None:
    """SnapshotError where ``snapshot`` was made from another trainer's dump: it has no weights."""
    opened = open_snapshot(snapshot)
    if opened.imported is not None:
        raise not_to_replay(opened.path, opened.imported)


def resolve_device(device: str) -> str:
    """``auto`` as what is here; UsageError for a name that is none, or cuda where none is seen."""
    if device == "auto":
        return "cuda" if has_cuda() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r}: expected auto, cpu or cuda")
    if device == "cuda" and not has_cuda():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        raise UsageError(
            fault(
                "--device",
                None,
                f"cuda, but no NVIDIA device is visible here{why}",
                "a device of this machine",
                "Take --device cpu, or auto for what is here; spike-replay doctor tells what that "
                "is",
            )
        )
    return device


def check_rows(snapshot: Path, rows: str) -> None:
    """UsageError where ``rows`` packs prefix trees and no batch of ``snapshot`` has a tree."""
    if rows == RECORDED:
        return
    opened = open_snapshot(snapshot)
    reader = reader_of(opened)
    if not any(reader.may_hold_trees(opened, dp) for dp in range(opened.parallel.dp)):
        raise no_trees(opened.path, rows)


def no_trees(snapshot: Path, rows: str) -> UsageError:
    """The error for ``rows`` asked for where there is no tree to pack."""
    return UsageError(
        fault(
            snapshot,
            "rows",
            f"{rows} asked for where no row is a prefix tree (merge_info)",
            RECORDED,
            "Leave the option --rows out",
        )
    )
