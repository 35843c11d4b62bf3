"""One row a snapshot: what it states, whether it is whole, preserved, or next to be rotated away.

Metadata and directory listings are read, tensors never. A broken snapshot gets a row that says why.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.errors import SpikeReplayError
from replay_lib.finding.places import snapshots_in
from replay_lib.rule import ratio_of
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.preserved import changed_files, read_manifest


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step. ``path`` is the trainer's snapshot, None where it was rotated away.

    Norms are L2 before clipping; ``layout`` is in ranks; ``payloads`` are rank 0's routing
    payloads, ``routing_files`` the ranks that have any; ``age`` is seconds since the newest file.
    ``why`` tells what makes it unusable ("" where it is whole). ``preserved`` is its preserved
    copy, ``preserved_why`` what is wrong with that one; ``hashed`` of ``preserved_files`` have a
    sha256. ``goes_next``: the trainer's next spike deletes it.
    """

    step: int
    root: Path
    path: Path | None
    grad_norm_preclip: float | None = None
    grad_norm_median: float | None = None
    ratio: float | None = None
    layout: dict[str, int] | None = None
    payloads: int | None = None
    routing_files: int = 0
    files: int = 0
    bytes: int = 0
    age: float | None = None
    why: str = ""
    preserved: Path | None = None
    preserved_why: str = ""
    preserved_files: int = 0
    hashed: int = 0
    goes_next: bool = False
    max_snapshots: int | None = None

    @property
    def complete(self) -> bool:
        """Whether a replay can read it."""
        return not self.why

    def as_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite are "NaN", "Infinity" and "-Infinity"."""
        numbers = ("grad_norm_preclip", "grad_norm_median", "ratio")
        return {
            "step": self.step,
            "path": str(self.path) if self.path else None,
            **{name: _finite(getattr(self, name)) for name in numbers},
            "layout": self.layout,
            "routing_payload_count_rank0": self.payloads,
            "routing_files": self.routing_files,
            "files": self.files,
            "bytes": self.bytes,
            "age_seconds": None if self.age is None else round(self.age, 1),
            "complete": self.complete,
            "why": self.why,
            "preserved": str(self.preserved) if self.preserved else None,
            "preserved_why": self.preserved_why,
            "preserved_files": self.preserved_files,
            "hashed": self.hashed,
            "goes_next": self.goes_next,
        }


def _finite(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]


def rows_of(root: Path, only: Path | None = None) -> list[Row]:
    """Rows of the trainer's ``root`` and of its preserved sibling, lowest step first.

    With ``only`` the row of that step alone; which ones the rotation takes next is told as it
    is in the whole root.
    """
    kept = {path.name: path for path in snapshots_in(layout.preserved_root(root))}
    there = {path.name: path for path in snapshots_in(root)}
    names = sorted({**kept, **there}, key=lambda name: (layout.step_of(Path(name)) or 0, name))
    wanted = [name for name in names if only is None or name == only.name]
    rows = [_row(root, there.get(name), kept.get(name)) for name in wanted]
    limit = _limit(root, there, rows)
    doomed = {path.name for path in next_to_go(list(there.values()), limit)}
    return [replace(r, goes_next=r.path is not None and r.path.name in doomed) for r in rows]


def next_to_go(snapshots: Sequence[Path], limit: int | None) -> list[Path]:
    """What the trainer deletes when it saves its next spike: the lowest steps, whole directories.

    ``snapshots`` are those in its root, lowest step first; ``limit`` is ``max_snapshots``, which
    the trainer hands to Megatron-Bridge as ``most_recent_k``. Below 1 nothing is ever deleted. The
    order is by step, not by time.
    """
    if limit is None or limit < 1:
        return []
    return list(snapshots[: max(len(snapshots) + 1 - limit, 0)])


def _limit(root: Path, there: dict[str, Path], rows: Sequence[Row]) -> int | None:
    """``max_snapshots`` of the newest snapshot that can be read; None where none can."""
    for path in reversed(list(there.values())):
        known = next((r for r in rows if r.path == path), None)
        row = known or _row(root, path, None)
        if row.max_snapshots is not None:
            return row.max_snapshots
    return None


def _row(root: Path, path: Path | None, preserved: Path | None) -> Row:
    place = path or preserved
    assert place is not None
    step = layout.step_of(place)
    assert step is not None
    row = Row(step=step, root=root, path=path)
    if preserved is not None:
        row = replace(row, **_preserved(preserved, path))
    try:
        opened = open_snapshot(place)
        return replace(row, **_stated(opened))
    except SpikeReplayError as error:
        return replace(row, why=_one_line(str(error)), **_listed(place))
    except OSError as error:
        told = f"{place.name}: {error.strerror or error}"
        return replace(row, why=told, **_listed(place))


def _stated(snapshot: Snapshot) -> dict[str, Any]:
    parallel = snapshot.parallel
    axes = ("tp", "pp", "cp", "ep", "etp", "dp")
    ranked = [layout.rank_file(Path(n)) for n in snapshot.sizes if n.startswith("routing_")]
    norm, median = snapshot.grad_norm_preclip, snapshot.grad_norm_median
    newest = snapshot.path / (layout.PORTABLE if snapshot.portable else layout.AXRL_METADATA)
    if snapshot.legacy:
        newest = snapshot.path / layout.MEGATRON_METADATA
    return {
        "step": snapshot.step,
        "grad_norm_preclip": norm,
        "grad_norm_median": median,
        "ratio": None if norm is None else ratio_of(norm, median),
        "layout": {
            "world_size": parallel.world_size,
            **{axis: getattr(parallel, axis) for axis in axes},
        },
        "payloads": snapshot.routing_payload_count_rank0,
        "routing_files": sum(each is not None for each in ranked),
        "files": len(snapshot.sizes),
        "bytes": snapshot.size,
        "age": max(time.time() - newest.stat().st_mtime, 0.0),
        "max_snapshots": snapshot.spike.max_snapshots,
    }


def _listed(directory: Path) -> dict[str, Any]:
    """What a listing tells of a snapshot that cannot be opened."""
    files = size = routed = 0
    newest: float | None = None
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.is_file():
                    continue
                stat = entry.stat()
                files, size = files + 1, size + stat.st_size
                newest = max(newest or stat.st_mtime, stat.st_mtime)
                routed += entry.name.startswith("routing_payload_rank")
    except OSError:
        pass  # it is being deleted, or may not be looked at: what was seen is told
    age = None if newest is None else max(time.time() - newest, 0.0)
    return {"files": files, "bytes": size, "routing_files": routed, "age": age}


def _preserved(preserved: Path, source: Path | None) -> dict[str, Any]:
    """The preserved copy, and what is wrong with it: nothing is read but its manifest."""
    told: dict[str, Any] = {"preserved": preserved}
    try:
        manifest = read_manifest(preserved)
        if manifest is None:
            return told | {"preserved_why": f"no {layout.PRESERVED_MANIFEST}: not made by preserve"}
        told |= {"preserved_files": len(manifest.files), "hashed": manifest.hashed}
        changed = changed_files(preserved, manifest)
        if changed:
            named = ", ".join(list(changed)[:3])
            return told | {"preserved_why": f"{len(changed)} files changed since: {named}"}
        if source is not None and (differs := written_anew(source, preserved)):
            return told | {"preserved_why": differs}
    except (SpikeReplayError, OSError) as error:
        return told | {"preserved_why": _one_line(str(error))}
    return told


def written_anew(source: Path, preserved: Path) -> str:
    """Whether the trainer wrote this step again after it was preserved, in words; "" if not."""
    manifest = read_manifest(preserved)
    for name in (layout.AXRL_METADATA, layout.MEGATRON_METADATA):
        kept = manifest.files.get(name) if manifest else None
        try:
            stat = (source / name).stat()
        except OSError:
            continue
        if kept is not None and (stat.st_size, stat.st_mtime_ns) != (kept.size, kept.mtime_ns):
            return "the trainer wrote this step again after it was preserved"
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
