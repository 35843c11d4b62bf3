"""The directory that snapshots of a run lie in: what is kept, rotation, what a kill left.

Rank 0 alone changes it. What is not whole has a hidden name (:mod:`replay_lib.unfinished`), which
no reader takes for a snapshot.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from replay_lib import layout
from replay_lib.unfinished import clear_leftovers, remove_whole


def kept(root: Path) -> list[Path]:
    """Whole snapshots in ``root``, oldest step first."""
    found = [(layout.step_of(p), p) for p in root.iterdir()] if root.is_dir() else []
    return [path for step, path in sorted((s, p) for s, p in found if s is not None)]


def clear(root: Path, limit: int) -> None:
    """End what a killed recorder left: unfinished snapshots go, and what is beyond ``limit``.

    One that a living process is building stays. An error leaves things as they are.
    """
    with suppress(OSError):
        clear_leftovers(root)
        rotate(root, limit)


def rotate(root: Path, limit: int) -> None:
    """Delete the oldest beyond ``limit`` (below 1: none), hidden first: none is found in part.

    Only ``iter_*`` of this directory; preserved snapshots lie in a sibling and are never seen here.
    """
    snapshots = kept(root)
    for path in snapshots[: max(len(snapshots) - limit, 0)] if limit >= 1 else []:
        remove_whole(path)
