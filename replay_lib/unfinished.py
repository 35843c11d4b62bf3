"""Directories that are built under a hidden name and renamed, and what killed builders left.

A hidden sibling is named ``.<target>.<host>-<random>.part`` and locked (``flock`` on the directory
itself) while its builder lives. The system drops that lock with the process, so one that can be
locked by somebody else was left by a builder that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

#: Where locks say nothing (another host's builder, a file system without them), one that has not
#: changed for a day is taken for abandoned: a builder makes a file every few minutes at least.
ABANDONED_SECONDS = 24 * 3600

_UNLOCKABLE = frozenset(
    [errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL]
)
_HIDDEN = re.compile(r"^\.(?P<target>.+)\.(?P<host>[A-Za-z0-9-]*)-[a-z0-9_]{8}\.part$")


@contextmanager
def hidden_sibling(target: Path) -> Iterator[Path]:
    """A new hidden directory beside ``target``, locked until the block ends.

    The block renames it (see :func:`take_place_of`) or it is removed, whatever ends the block.
    Raises the OSError of a place where none can be made.
    """
    part, lock = _made(target)
    try:
        yield part
    finally:
        try:
            if _is_at(part, lock):
                shutil.rmtree(part, ignore_errors=True)
        finally:
            os.close(lock)


def take_place_of(part: Path, target: Path) -> None:
    """Rename ``part`` to ``target`` and flush the directory that both lie in.

    OSError (ENOTEMPTY, EEXIST, ENOTDIR) where something is there already; nothing changes then.
    """
    part.rename(target)
    flush(target.parent)


def flush(path: Path) -> None:
    """fsync of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_whole(directory: Path) -> None:
    """Delete ``directory`` so that a kill leaves it whole or gone by its name.

    It is hidden first; what a kill then leaves is cleared like any other leftover. OSError where it
    cannot be renamed (nothing has changed then) or not all of it can be deleted.
    """
    hidden = directory.with_name(f"{_prefix(directory.name)}{uuid4().hex[:8]}.part")
    lock = os.open(directory, os.O_RDONLY)
    try:
        _locked(lock)
        take_place_of(directory, hidden)
        shutil.rmtree(hidden)
        flush(hidden.parent)
    finally:
        os.close(lock)


def leftovers(parent: Path, target: str | None = None) -> list[Path]:
    """Hidden directories in ``parent`` whose builder is dead, of ``target`` alone or of all."""
    return [path for path in _hidden_in(parent, target) if _is_left(path)]


def clear_leftovers(parent: Path, target: str | None = None) -> list[Path]:
    """Remove what :func:`leftovers` finds; the paths that are gone now."""
    return [path for path in _hidden_in(parent, target) if _cleared(path)]


def _made(target: Path) -> tuple[Path, int]:
    while True:
        prefix = _prefix(target.name)
        part = Path(tempfile.mkdtemp(prefix=prefix, suffix=".part", dir=target.parent))
        lock = os.open(part, os.O_RDONLY)
        # another command may have taken it for a leftover before it was locked: then make another
        if _locked(lock) is not False and _is_at(part, lock):
            return part, lock
        os.close(lock)
        with suppress(OSError):
            part.rmdir()


def _prefix(name: str) -> str:
    """How hidden names for ``name`` begin: cut, so that they are no longer than names may be."""
    return f".{_cut(name, 120)}.{_cut(re.sub('[^A-Za-z0-9-]', '-', socket.gethostname()), 40)}-"


def _cut(text: str, count: int) -> str:
    """The first ``count`` bytes of a text, as a text."""
    return os.fsencode(text)[:count].decode(errors="ignore")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _locked(descriptor: int) -> bool | None:
    """True: it is ours now; False: a living process has it; None: locks say nothing here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNLOCKABLE:
            return None
        return False
    return True


def _hidden_in(parent: Path, target: str | None) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = sorted(name for name, is_directory in found if is_directory)
    matched = ((name, _HIDDEN.match(name)) for name in names)
    wanted = None if target is None else _cut(target, 120)
    return [parent / n for n, m in matched if m and wanted in (None, m["target"])]


def _is_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # gone meanwhile, or not ours to look at
    try:
        return _is_dead(path, descriptor)
    finally:
        os.close(descriptor)


def _is_dead(path: Path, descriptor: int) -> bool:
    locked = _locked(descriptor)
    if locked is False:
        return False
    match = _HIDDEN.match(path.name)
    if locked and match and path.name.startswith(_prefix(match["target"])):
        return True  # made on this host
    return time.time() - os.fstat(descriptor).st_mtime > ABANDONED_SECONDS


def _cleared(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        if not _is_dead(path, descriptor):
            return False
        shutil.rmtree(path, ignore_errors=True)  # while it is locked: no builder can have it
        return not path.exists()
    finally:
        os.close(descriptor)
