"""``preserve``: a copy of a snapshot in the sibling root that no rotation reaches."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from replay_lib import layout
from replay_lib.errors import SnapshotError, UsageError, fault
from replay_lib.preserving.hashing import fill_in_background, locked, verify
from replay_lib.preserving.placing import Tell, place_files, silent
from replay_lib.preserving.source import (
    SETTLED_SECONDS,
    SourceFile,
    check_taken,
    list_settled,
    list_source,
    rotated_away,
)
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.preserved import (
    Kept,
    Manifest,
    check_preserved,
    now,
    read_manifest,
    write_manifest,
)
from replay_lib.unfinished import clear_leftovers, flush, hidden_sibling, take_place_of

_CLOSED = frozenset(
    [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM]
)
_TAKEN = frozenset([errno.ENOTEMPTY, errno.EEXIST])


@dataclass(frozen=True, kw_only=True)
class Preserved:
    """What came of it. ``already``: it was preserved before, and nothing was done.

    ``source_gone``: the trainer deleted its source meanwhile; the preserved one is whole.
    ``cleared`` are hidden directories of killed commands that were removed. ``verified``: every
    file was read. ``hashing``: the process that fills in sha256, None where none was started.
    """

    source: Path
    path: Path
    manifest: Manifest
    already: bool = False
    source_gone: bool = False
    verified: bool = False
    cleared: tuple[Path, ...] = ()
    hashing: int | None = None


def preserve(
    source: str | Path,
    *,
    task: str | None = None,
    role: str | None = None,
    verified: bool = False,
    background: bool = False,
    settled: float = SETTLED_SECONDS,
    tell: Tell = silent,
    waiting: Callable[[Path], None] = lambda _: None,
) -> Preserved:
    """Preserve the snapshot directory ``source``; of one that is preserved already, say so.

    ``task`` and ``role`` go into the manifest. With ``verified`` every file is read in the end, and
    compared where its sha256 was known; with ``background`` a process of its own fills in those
    that are not. ``settled`` are the seconds for which nothing may have changed in ``source``.
    ``waiting`` is called where another command preserves the same snapshot, and waited for.

    ``source`` is never written to. In the end all of it is preserved or nothing: raises
    SnapshotError where the source cannot be used, changes or vanishes, or where what is preserved
    is no longer what it was; UsageError where there is no room.
    """
    place = Path(source).absolute()
    ask = _Ask(task=task, role=role, verified=verified, settled=settled, tell=tell)
    if layout.is_preserved_root(place.parent):
        done = _seen_again(place, None, ask)
    else:
        done = _preserved(place, ask, waiting)
    if verified:
        done = replace(done, manifest=verify(done.path, tell), verified=True)
    elif background and done.manifest.hashed < len(done.manifest.files):
        done = replace(done, hashing=fill_in_background(done.path))
    return done


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """Arguments of :func:`preserve`."""

    task: str | None
    role: str | None
    verified: bool
    settled: float
    tell: Tell


def _preserved(source: Path, ask: _Ask, waiting: Callable[[Path], None]) -> Preserved:
    root = layout.preserved_root(source.parent)
    target = root / source.name
    if target.exists():  # whole, for it was renamed: nothing is locked, who may only read is told
        return replace(_seen_again(target, source, ask), cleared=tuple(clear_leftovers(root)))
    opened = open_snapshot(source)  # what cannot be used is told before anything is made
    with _writable(target):
        root.mkdir(exist_ok=True)
    cleared = tuple(clear_leftovers(root))
    try:
        with locked(target, seconds=0):
            done = _under_lock(source, target, ask, opened)
    except Timeout:
        waiting(target)
        with locked(target):
            done = _under_lock(source, target, ask, None)
    return replace(done, cleared=cleared)


def _under_lock(source: Path, target: Path, ask: _Ask, opened: Snapshot | None) -> Preserved:
    """As :func:`preserve`; ``opened`` is the source as it was opened just now, None: long ago."""
    if target.exists():
        return _seen_again(target, source, ask)
    opened = opened or open_snapshot(source)
    with _writable(target), hidden_sibling(target) as part:
        try:
            files = list_settled(source, ask.settled)
        except FileNotFoundError as error:
            raise rotated_away(source, 0, len(opened.sizes)) from error
        kept = place_files(source, files, part, ask.tell)
        gone = _deleted_meanwhile(source, opened, files, part)
        part.chmod(0o755)
        manifest = _manifest(opened, part, kept, ask)
        write_manifest(part, manifest)
        for directory in {part, *((part / name).parent for name in kept if "/" in name)}:
            flush(directory)
        try:
            take_place_of(part, target)
        except OSError as error:
            if error.errno in _TAKEN:  # another host was faster, and locks do not reach that far
                return _seen_again(target, source, ask)
            raise
    return Preserved(source=source, path=target, manifest=manifest, source_gone=gone)


def _manifest(opened: Snapshot, part: Path, kept: dict[str, Kept], ask: _Ask) -> Manifest:
    return Manifest(
        schema=1,
        task=ask.task,
        role=ask.role,
        source=str(opened.path),
        step=opened.step,
        preserved_at=now(),
        inode=part.stat().st_ino,
        files=kept,
    )


def _deleted_meanwhile(
    source: Path, opened: Snapshot, files: dict[str, SourceFile], part: Path
) -> bool:
    """Whether the source is being deleted; then what was taken is looked at closely.

    SnapshotError where the source has files that it had not, or that are not what they were.
    """
    try:
        after = list_source(source)
    except (FileNotFoundError, NotADirectoryError):
        after = {}
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        after = {}
    if after == files:
        return False
    changed = [name for name, file in after.items() if files.get(name) != file]
    if changed:
        found = f"a snapshot that is being written ({changed[0]} changed)"
        then = (
            "Nothing was kept. Wait until all ranks have finished writing, then preserve it again"
        )
        raise SnapshotError(fault(source, None, found, "one at rest", f"{then}."))
    try:
        check_taken(opened, part, set(files))
    except SnapshotError as error:
        raise rotated_away(source, len(files), len(files) + 1) from error
    return True


def _seen_again(target: Path, source: Path | None, ask: _Ask) -> Preserved:
    """What is preserved at ``target`` already, after it was looked at.

    Where all of it is read next, times are left to that: content decides.
    """
    manifest = read_manifest(target) if ask.verified else check_preserved(target)
    if manifest is None:
        found = f"a directory without {layout.PRESERVED_MANIFEST}, not made by this command"
        then = "Move it elsewhere, then preserve the snapshot again"
        raise SnapshotError(fault(target, None, found, "a preserved snapshot", f"{then}."))
    place = Path(manifest.source) if source is None else source
    gone = not place.is_dir()
    if source is not None and not gone:
        _check_source(source, target, manifest)
    return Preserved(source=place, path=target, manifest=manifest, already=True, source_gone=gone)


def _check_source(source: Path, target: Path, manifest: Manifest) -> None:
    """SnapshotError where the source is no longer what was preserved of it."""
    try:
        files = list_source(source)
    except FileNotFoundError:
        return  # it is being deleted
    differ = [name for name, file in files.items() if not _same(file, manifest.files.get(name))]
    if differ:
        found = f"{len(differ)} files that are not those preserved ({', '.join(differ[:3])})"
        then = (
            "The trainer wrote this step again, or had not finished when it was preserved. Move "
            f"{target} elsewhere, then preserve it again"
        )
        raise SnapshotError(fault(source, None, found, f"what is in {target}", f"{then}."))


def _same(file: SourceFile, kept: Kept | None) -> bool:
    """Whether a file of the source is what was preserved of it.

    Times of copies may be coarser than the source's, on another file system: two seconds at most.
    """
    if kept is None or file.size != kept.size:
        return False
    coarse = 2_000_000_000 if kept.how == "copied" else 0
    return abs(file.mtime_ns - kept.mtime_ns) <= coarse


@contextmanager
def _writable(target: Path) -> Iterator[None]:
    """Errors of a full or closed place as one UsageError about ``target``."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CLOSED:
            raise
        found = f"a place that cannot be written ({error.strerror or error})"
        then = "Nothing of it is kept there, and the snapshot is as it was"
        expected = "a directory with room for the files that cannot be linked"
        raise UsageError(fault(target, None, found, expected, f"{then}.")) from error
