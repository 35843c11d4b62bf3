"""The files of a snapshot as they lie in its directory now; it is never written to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replay_lib import layout
from replay_lib.errors import IncompleteSnapshotError, SnapshotError, fault
from replay_lib.snapshot.documents import COPY_AGAIN, missing
from replay_lib.snapshot.model import Snapshot

#: A snapshot whose newest file is younger may still be written: ranks write without a barrier.
SETTLED_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file: ``path`` is where it lies (a link inside the directory is followed)."""

    path: Path
    size: int
    mtime_ns: int
    inode: int


def list_source(source: Path) -> dict[str, SourceFile]:
    """Every file below ``source`` by its path in there, sorted.

    SnapshotError that names what is no regular file: a link that leads out of the directory, a
    socket, a device. Files of NFS that stand for deleted ones are left out, and so is a manifest.
    """
    found = dict(_below(source, source.resolve(), ""))
    found.pop(layout.PRESERVED_MANIFEST, None)
    return dict(sorted(found.items()))


def _below(directory: Path, top: Path, prefix: str) -> Iterator[tuple[str, SourceFile]]:
    with os.scandir(directory) as entries:
        listed = [e for e in entries if not e.name.startswith(".nfs")]
    for entry in listed:
        name = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), top, f"{name}/")
            continue
        path = Path(entry.path)
        if entry.is_symlink():
            path = path.resolve()
            if not path.is_relative_to(top):
                raise _refused(directory / entry.name, f"a link to {path}, out of the snapshot")
        stat = entry.stat()
        if not entry.is_file():
            raise _refused(directory / entry.name, "neither a file nor a directory")
        yield (
            name,
            SourceFile(path=path, size=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino),
        )


def _refused(path: Path, found: str) -> SnapshotError:
    then = "Only files of the snapshot itself are taken: remove it, or put the file in its place"
    return SnapshotError(fault(path, None, found, "a regular file", f"{then}."))


def list_settled(source: Path, settled: float = SETTLED_SECONDS) -> dict[str, SourceFile]:
    """As :func:`list_source`, after nothing has changed in there for ``settled`` seconds.

    Gives up after ten such spans with a SnapshotError: somebody goes on writing.
    """
    files = list_source(source)
    for _ in range(10):
        newest = max((f.mtime_ns for f in files.values()), default=0) / 1e9
        if not time.time() - newest < settled:
            return files
        time.sleep(settled)
        again = list_source(source)
        if again == files:  # a clock that runs ahead, or nobody writes any more
            return files
        files = again
    found = f"files that still change after {10 * settled:.0f} s"
    raise SnapshotError(fault(source, None, found, "a snapshot that is written", f"{COPY_AGAIN}."))


def check_taken(opened: Snapshot, taken: Path, names: set[str]) -> None:
    """Whether what was ``taken`` is whole, where its source was being deleted at the time.

    Then some files may have been gone before any were taken, and each that a replay needs is looked
    for: the checkpoint's by its own table. Raises IncompleteSnapshotError.
    """
    from replay_lib.snapshot.checkpoint import stored_table

    stored_table(taken)
    if not opened.routing_payload_count_rank0:
        return
    for rank in range(opened.parallel.world_size):
        if layout.routing_file(rank) not in names:
            why = f"the routing payloads of rank {rank}"
            raise missing(opened.path / layout.routing_file(rank), why, "It was deleted meanwhile")


def rotated_away(source: Path, taken: int, total: int) -> IncompleteSnapshotError:
    """The error where the source vanishes before all of it was taken."""
    found = f"a snapshot that was deleted while it was preserved ({taken} of {total} files taken)"
    then = (
        "Nothing of it is kept, and what was preserved before is as it was. The trainer's rotation "
        "deletes the lowest steps first: spike-replay find tells which go next"
    )
    return IncompleteSnapshotError(fault(source, None, found, "all of its files", f"{then}."))
