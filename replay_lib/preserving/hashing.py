"""sha256 of a preserved snapshot's files: filled in once, compared when somebody asks."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from replay_lib.errors import SnapshotError, UsageError, fault
from replay_lib.preserving.placing import BLOCK, Meter, Tell, in_threads, silent
from replay_lib.snapshot.preserved import (
    NAMED,
    Kept,
    Manifest,
    changed_files,
    read_manifest,
    write_manifest,
)

LOCKS = ".locks"  # in the root of preserved snapshots: nobody takes it for a snapshot
SAVED_EVERY_SECONDS = 20.0  # how much of the background's reading a kill can lose


@contextmanager
def locked(preserved: Path, what: str = "lock", seconds: float = -1) -> Iterator[None]:
    """Hold the lock of one preserved snapshot; waits ``seconds`` (below 0: as long as it takes).

    Timeout where somebody else has it. Where the file system knows no locks, renames alone keep
    two commands apart, and both may do the work.
    """
    place = preserved.parent / LOCKS
    try:
        if not place.is_dir():
            place.mkdir(exist_ok=True)
            place.chmod(preserved.parent.stat().st_mode & 0o777)  # whoever may preserve may lock
        lock = FileLock(place / f"{preserved.name}.{what}", mode=0o666)
        lock.acquire(timeout=seconds)
    except NotImplementedError:
        yield
        return
    except Timeout:
        raise
    except OSError as error:
        found = f"a lock that cannot be made ({error.strerror or error})"
        raise UsageError(fault(place, None, found, "a directory that can be written")) from error
    try:
        yield
    finally:
        lock.release()


def verify(preserved: Path, tell: Tell = silent) -> Manifest:
    """Read every file of ``preserved`` and compare it with the manifest; the manifest as it is now.

    A sha256 that was not known is filled in. A file whose time or inode changed while its content
    did not (a restored backup, a touch) is noted as it is now. Raises SnapshotError naming every
    file that is gone, differs, or changed before its content was ever read.
    """
    manifest = _manifest(preserved)
    changes = changed_files(preserved, manifest)
    present = [
        name for name, change in ((n, changes.get(n)) for n in manifest.files) if change != "gone"
    ]
    found = _digests(preserved, present, manifest, tell)
    wrong = {name: "gone" for name in manifest.files if name not in found}
    for name, kept in found.items():
        stated = manifest.files[name]
        if stated.sha256 is None and name in changes:
            wrong[name] = f"{changes[name]}, and its content was not known"
        elif stated.sha256 is not None and kept.sha256 != stated.sha256:
            wrong[name] = "another content"
    if wrong:
        raise _different(preserved, manifest, wrong)
    return _fill(preserved, found)


def fill(preserved: Path, tell: Tell = silent) -> Manifest | None:
    """Read the files whose sha256 is not known, and note it; None where another process does.

    What is known is saved every now and then, so a kill loses little. A file that changed since it
    was preserved is left out: whoever opens the snapshot is told.
    """
    try:
        with locked(preserved, "sha256", seconds=0):
            return _fill_in(preserved, tell)
    except Timeout:
        return None


def _fill_in(preserved: Path, tell: Tell) -> Manifest:
    manifest = _manifest(preserved)
    changes = changed_files(preserved, manifest)
    names = [n for n, k in manifest.files.items() if k.sha256 is None and n not in changes]
    waiting: dict[str, Kept] = {}
    saved = time.monotonic()
    meter = Meter(total=sum(manifest.files[name].size for name in names), tell=tell)
    for name in names:  # one after the other: the training has the disk too
        with suppress(OSError, SnapshotError):  # gone or written to: whoever opens it is told
            waiting[name] = _read(preserved, name, manifest.files[name], meter)
        tell(meter.done, meter.total, name)
        if time.monotonic() - saved > SAVED_EVERY_SECONDS:
            manifest, waiting, saved = _fill(preserved, waiting), {}, time.monotonic()
    return _fill(preserved, waiting)


def _digests(preserved: Path, names: list[str], manifest: Manifest, tell: Tell) -> dict[str, Kept]:
    sizes = {name: manifest.files[name].size for name in names}
    meter = Meter(total=sum(sizes.values()), tell=tell)

    def read(name: str) -> tuple[str, Kept]:
        try:
            return name, _read(preserved, name, manifest.files[name], meter)
        except OSError as error:
            told = f"{error.strerror or error}"
            raise SnapshotError(fault(preserved / name, None, told, "a file to read")) from error

    def told(item: tuple[str, Kept]) -> None:
        tell(meter.done, meter.total, item[0])

    return dict(in_threads(read, sizes, told, meter))


def _read(preserved: Path, name: str, kept: Kept, meter: Meter) -> Kept:
    """The file as it is now; SnapshotError where it is written to meanwhile."""
    digest = hashlib.sha256()
    with (preserved / name).open("rb") as file:
        before = os.fstat(file.fileno())
        while block := file.read(BLOCK):
            digest.update(block)
            meter.add(len(block))
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        found, expected = "a file that is being written", "one at rest"
        raise SnapshotError(fault(preserved / name, None, found, expected))
    return Kept(
        size=after.st_size,
        mtime_ns=after.st_mtime_ns,
        inode=after.st_ino,
        how=kept.how,
        sha256=digest.hexdigest(),
    )


def _fill(preserved: Path, found: Mapping[str, Kept]) -> Manifest:
    """Put what was ``found`` into the manifest, which others may have changed meanwhile."""
    known = _manifest(preserved)
    if _noted(preserved, known, found) == known:
        return known  # so that whoever may only read can verify
    with locked(preserved):
        new = _noted(preserved, _manifest(preserved), found)
        write_manifest(preserved, new)
        return new


def _noted(preserved: Path, manifest: Manifest, found: Mapping[str, Kept]) -> Manifest:
    in_place = preserved.stat().st_ino == manifest.inode
    files = dict(manifest.files)
    for name, kept in found.items():
        # in a copy elsewhere times and inodes are of that place: only content is noted
        noted = kept if in_place else files[name].model_copy(update={"sha256": kept.sha256})
        files[name] = noted
    return manifest.model_copy(update={"files": files})


def _manifest(preserved: Path) -> Manifest:
    manifest = read_manifest(preserved)
    if manifest is None:
        then = "spike-replay preserve SNAPSHOT makes one"
        raise SnapshotError(
            fault(preserved, None, "no preserved.json", "a preserved snapshot", f"{then}.")
        )
    return manifest


def _different(preserved: Path, manifest: Manifest, wrong: Mapping[str, str]) -> SnapshotError:
    named = [f"{name} ({told})" for name, told in list(wrong.items())[:NAMED]]
    rest = len(wrong) - len(named)
    told = ", ".join(named) + (f" and {rest} more" if rest else "")
    then = "The others have their content. What differs is lost here: look for it in a backup"
    found = f"{len(wrong)} of {len(manifest.files)} files that differ: {told}"
    return SnapshotError(fault(preserved, "sha256", found, "the content that was preserved", then))


def fill_in_background(preserved: Path) -> int | None:
    """Start a process of its own that fills in sha256, at the lowest priority; its id.

    It survives this command and says nothing: how far it came is in the manifest, which ``find``
    and ``preserve`` tell. None where no process can be started; the next ``preserve`` tries again.
    """
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "replay_lib.preserving", str(preserved.absolute())]
    nothing = [
        (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0)  # neither terminal nor pipe is held
        for number in (0, 1, 2)
    ]
    try:
        return os.posix_spawn(
            sys.executable,
            command,
            {**os.environ, "PYTHONPATH": paths},
            file_actions=nothing,
            setsid=True,
        )
    except (OSError, NotImplementedError):
        return None
