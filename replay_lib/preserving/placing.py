"""Take the files of a snapshot into a directory: large ones as hardlinks, small ones as copies.

Everything is linked first, which takes microseconds a file: from then on a rotation cannot take it
away. Small files are then made copies of, from the links.

Why small files are copied: a hardlink survives deletion, not rewriting in place. A trainer that
resumes and comes by the same step opens the same files for writing, and the linked file is that
file. What is small (batches, routes, figures, settings) is what cannot be had again, and a copy of
it costs little. What is large is the checkpoint: copying it takes minutes to hours and as much room
again, a rewrite of it is noticed (size, time, inode, sha256), and weights before the step can often
be had from the run's own checkpoints.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, TypeVar
from uuid import uuid4

from replay_lib.errors import SnapshotError, fault
from replay_lib.preserving.source import SourceFile, rotated_away
from replay_lib.snapshot.preserved import Kept
from replay_lib.unfinished import flush

#: From this size on a file is linked, whatever it is. A batch of 512 rows x 16k tokens is 0.5 GiB
#: a rank at most, and mostly some MiB: under it all of a rank's small files are copied in a second.
LINK_BYTES = 64 << 20
_CHECKPOINT = ".distcp"  # a checkpoint's files are linked whatever their size

#: What says that a link cannot be made here, and that a copy can: another file system, somebody
#: else's file (fs.protected_hardlinks), too many links, a file system without links.
_REFUSED = frozenset(
    [
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.EMLINK,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
    ]
)
_VANISHED = frozenset([errno.ENOENT, errno.ESTALE, errno.ENOTDIR])
THREADS = 16  # a link or a small copy waits for the disk or the network, not for a core
GROUP_FILES, GROUP_BYTES = 64, 16 << 20  # what one thread takes at a time
BLOCK = 4 << 20
TOLD_EVERY_SECONDS = 0.5  # while one large file is copied

#: Called with bytes done, bytes in all and the name of a file; from the calling thread alone.
Tell = Callable[[int, int, str], None]
_T = TypeVar("_T")


def is_large(name: str, size: int) -> bool:
    """Whether a file is hardlinked rather than copied."""
    return name.endswith(_CHECKPOINT) or size >= LINK_BYTES


def silent(_done: int, _total: int, _name: str) -> None:
    """Tell nobody."""


@dataclass
class Meter:
    """Bytes that threads have read so far; ``stop`` makes them end at the next block."""

    total: int
    tell: Tell
    done: int = 0
    stop: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Count bytes; raises StoppedError where somebody else's failure ends it all."""
        with self._lock:
            self.done += count
        if self.stop:
            raise StoppedError


class StoppedError(Exception):
    """Another thread failed: its error is the one to tell."""


def place_files(
    source: Path, files: Mapping[str, SourceFile], part: Path, tell: Tell = silent
) -> dict[str, Kept]:
    """Take ``files`` of ``source`` into the empty directory ``part``; what each became, by name.

    Raises IncompleteSnapshotError where the source vanishes, SnapshotError where a file changes
    meanwhile, and the OSError of a full disk.
    """
    for name in files:
        if "/" in name:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    with _vanishing(source, taken, len(files)):
        refused = _link_all(files, part, taken)
        linked = [n for n in files if n not in refused and is_large(n, files[n].size)]
        # copied from the link where there is one: nobody can take that away
        others = {n: f.path if n in refused else part / n for n, f in files.items()}
        for name in linked:
            del others[name]
        copied = _copy_all(files, others, part, taken, tell)
    # after all are written: the first flush takes most of the others' data along
    in_threads(lambda name: flush(part / name), dict.fromkeys(copied, 0), lambda _: None)
    return {name: copied.get(name) or _kept_link(files[name]) for name in files}


def _kept_link(file: SourceFile) -> Kept:
    return Kept(size=file.size, mtime_ns=file.mtime_ns, inode=file.inode, how="linked")


@contextmanager
def _vanishing(source: Path, taken: set[str], total: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _VANISHED:
            raise rotated_away(source, len(taken), total) from error
        raise


def _link_all(files: Mapping[str, SourceFile], part: Path, taken: set[str]) -> set[str]:
    """Names of files that cannot be linked."""

    def link(name: str) -> tuple[str, bool]:
        try:
            (part / name).hardlink_to(files[name].path)
        except OSError as error:
            if error.errno in _REFUSED:
                return name, False
            raise
        _check_same(files[name].path, files[name], (part / name).lstat())
        return name, True

    def linked(item: tuple[str, bool]) -> None:
        if item[1]:
            taken.add(item[0])

    nothing = dict.fromkeys(files, 0)
    return {name for name, is_linked in in_threads(link, nothing, linked) if not is_linked}


def _copy_all(
    files: Mapping[str, SourceFile],
    origins: Mapping[str, Path],
    part: Path,
    taken: set[str],
    tell: Tell,
) -> dict[str, Kept]:
    """Copies of ``origins``, the smallest first: they are what cannot be had again."""
    meter = Meter(total=sum(files[name].size for name in origins), tell=tell)
    sizes = {name: files[name].size for name in sorted(origins, key=lambda n: (files[n].size, n))}

    def copy(name: str) -> tuple[str, Kept]:
        return name, _copy(origins[name], files[name], part / name, meter)

    def placed(item: tuple[str, Kept]) -> None:
        taken.add(item[0])
        meter.tell(meter.done, meter.total, item[0])

    return dict(in_threads(copy, sizes, placed, meter))


def _copy(origin: Path, stated: SourceFile, target: Path, meter: Meter) -> Kept:
    """One file under its own inode, with the source's time and mode; and its sha256."""
    temporary = target.with_name(f".{uuid4().hex}")
    digest = hashlib.sha256()
    with _readable(origin, stated.path) as read, temporary.open("xb") as write:
        while block := read.read(BLOCK):
            digest.update(block)
            write.write(block)
            meter.add(len(block))
        _check_same(stated.path, stated, os.fstat(read.fileno()))
        write.flush()
        os.fchmod(write.fileno(), os.fstat(read.fileno()).st_mode & 0o777)
        os.utime(write.fileno(), ns=(stated.mtime_ns, stated.mtime_ns))
        written = os.fstat(write.fileno())
    temporary.replace(target)
    return Kept(
        size=written.st_size,
        mtime_ns=written.st_mtime_ns,
        inode=written.st_ino,
        how="copied",
        sha256=digest.hexdigest(),
    )


def _readable(origin: Path, told_as: Path) -> IO[bytes]:
    """``origin``, opened; SnapshotError where it may not be read."""
    try:
        return origin.open("rb")
    except PermissionError as error:
        found = repr(error.strerror or str(error))
        raise SnapshotError(fault(told_as, None, found, "a file that may be read")) from error


def _check_same(path: Path, stated: SourceFile, found: os.stat_result) -> None:
    same = (found.st_size, found.st_mtime_ns, found.st_ino) == (
        stated.size,
        stated.mtime_ns,
        stated.inode,
    )
    if not same:
        then = "The trainer still writes, or writes this step anew: wait, then preserve it again"
        raise SnapshotError(
            fault(path, None, "a file that changed while it was taken", "one at rest", f"{then}.")
        )


def groups_of(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in their order, in groups for one thread: 64 files or 16 MiB, whichever is first.

    A thread per file would cost more than the file, where it is small or only linked.
    """
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if len(groups[-1]) >= GROUP_FILES or held >= GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def in_threads(
    work: Callable[[str], _T],
    sizes: Mapping[str, int],
    done: Callable[[_T], None],
    meter: Meter | None = None,
) -> list[_T]:
    """``work`` on every name, some at a time; ``done`` is called here with each result.

    ``sizes`` are the bytes that each is good for. The first error ends the rest and is raised, and
    so is whatever interrupts this thread.
    """
    results: list[_T] = []
    groups = groups_of(sizes)
    ended: SimpleQueue[Future[list[_T]]] = SimpleQueue()

    def all_of(names: list[str]) -> list[_T]:
        return [work(name) for name in names]

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for group in groups:
                pool.submit(all_of, group).add_done_callback(ended.put)
            for _ in groups:
                for result in _next(ended, meter).result():
                    results.append(result)
                    done(result)
        except BaseException:
            if meter is not None:
                meter.stop = True
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return results


def _next(ended: SimpleQueue[Future[_T]], meter: Meter | None) -> Future[_T]:
    """The next one that ended; while none does, the meter is told."""
    while True:
        try:
            return ended.get(timeout=TOLD_EVERY_SECONDS)
        except Empty:
            if meter is not None:
                meter.tell(meter.done, meter.total, "")
