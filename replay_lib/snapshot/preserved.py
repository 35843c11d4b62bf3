"""``preserved.json``: what a preserved snapshot consists of, and whether it still does.

A hardlinked file survives the deletion of its source, but not a trainer that resumes and writes the
same file in place. Whoever opens a preserved snapshot therefore compares size, time and inode of
every file with what the manifest says: a few microseconds a file, nothing is read. Content is
compared where it is asked for (:mod:`replay_lib.preserving`).
"""

from __future__ import annotations

import functools
import shlex
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replay_lib import layout
from replay_lib.errors import IncompleteSnapshotError, SnapshotError, fault
from replay_lib.snapshot.documents import read_json
from replay_lib.writing import replace_file

SCHEMA = 1
NAMED = 5  # files that an error names; how many more there are is told as a number
_WHY = "the list of a preserved snapshot's files"


class _Stated(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Kept(_Stated):
    """One file: ``size`` in bytes, ``mtime_ns`` and ``inode`` as preserved, ``sha256`` in hex.

    ``linked``: it is the source's file under another name; ``copied``: one of its own. ``sha256``
    is None until the file was read once.
    """

    size: int = Field(ge=0)
    mtime_ns: int
    inode: int = Field(ge=0)
    how: Literal["linked", "copied"]
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class Manifest(_Stated):
    """``files`` are by their path in the snapshot; ``source`` is where they were taken from.

    ``inode`` is that of the preserved directory itself: one with another inode was copied
    elsewhere, where times and inodes of its files say nothing, and no file is linked to the source.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    task: str | None
    role: str | None
    source: str
    step: int
    preserved_at: str
    inode: int = Field(ge=0)
    files: dict[str, Kept]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(kept.size for kept in self.files.values())

    @property
    def hashed(self) -> int:
        """Files whose sha256 is known."""
        return sum(kept.sha256 is not None for kept in self.files.values())

    @property
    def linked(self) -> int:
        """Files that are hardlinks."""
        return sum(kept.how == "linked" for kept in self.files.values())

    @property
    def how(self) -> str:
        """In words: ``38 linked, 12 copied``."""
        return f"{self.linked} linked, {len(self.files) - self.linked} copied"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in ``directory``; None where it has none. SnapshotError where it is broken."""
    path = directory / layout.PRESERVED_MANIFEST
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _parsed(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=64)
def _parsed(path: Path, _size: int, _mtime_ns: int, _inode: int) -> Manifest:
    raw = read_json(path, _WHY)
    version = raw.get("schema")
    if version != SCHEMA or isinstance(version, bool):
        newer = isinstance(version, int) and version > SCHEMA
        then = "A newer version of this package wrote it: take that one." if newer else None
        raise SnapshotError(fault(path, "schema", repr(version), repr(SCHEMA), then))
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        found = f"{first['input']!r:.80}"
        raise SnapshotError(fault(path, field, found, first["msg"])) from error
    outside = [name for name in manifest.files if not _is_inside(name)]
    if outside:
        expected = "names of files in the directory"
        raise SnapshotError(fault(path, "files", f"{outside[0]!r:.80}", expected))
    return manifest


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return not {"", ".", ".."} & set(parts) and name.isprintable() and "\\" not in name


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in ``directory``, whole."""
    text = manifest.model_dump_json(by_alias=True, indent=1)
    replace_file(directory / layout.PRESERVED_MANIFEST, f"{text}\n".encode())


def now() -> str:
    """The time as the manifest has it: UTC, to the second."""
    from datetime import UTC

    return datetime.now(UTC).isoformat(timespec="seconds")


def check_preserved(directory: Path) -> Manifest | None:
    """The manifest of ``directory`` after its files were compared with it; None where it has none.

    Raises IncompleteSnapshotError where a file is not there, SnapshotError where one is no longer
    what was preserved, both naming every such file (the first few by name).
    """
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    changes = changed_files(directory, manifest)
    if changes:
        raise _not_as_preserved(directory, manifest, changes)
    return manifest


def changed_files(directory: Path, manifest: Manifest) -> dict[str, str]:
    """What is no longer as preserved, by file: ``gone``, or what differs, in words. Reads nothing.

    In a copy of the preserved directory sizes alone are compared.
    """
    in_place = directory.stat().st_ino == manifest.inode
    told = ((name, _change(directory, name, k, in_place)) for name, k in manifest.files.items())
    return {name: change for name, change in told if change}


def _change(directory: Path, name: str, kept: Kept, in_place: bool) -> str:
    try:
        stat = (directory / name).stat()
    except (FileNotFoundError, NotADirectoryError):
        return "gone"
    if stat.st_size != kept.size:
        return f"{stat.st_size} bytes instead of {kept.size}"
    if in_place and stat.st_mtime_ns != kept.mtime_ns:
        return "written since"
    if in_place and stat.st_ino != kept.inode:
        return "another file in its place"
    return ""


def _not_as_preserved(
    directory: Path, manifest: Manifest, changes: dict[str, str]
) -> SnapshotError:
    named = [f"{name} ({change})" for name, change in list(changes.items())[:NAMED]]
    rest = len(changes) - len(named)
    told = ", ".join(named) + (f" and {rest} more" if rest else "")
    rewritten = any(manifest.files[name].how == "linked" for name in changes)
    why = (
        " A trainer that resumed and came by the same step writes into linked files."
        if rewritten
        else ""
    )
    gone = all(change == "gone" for change in changes.values())
    place = shlex.quote(str(directory))
    then = (
        f"It is no longer the snapshot that was preserved.{why} spike-replay preserve --verify "
        f"{place} reads all files and tells which of them still have their content"
    )
    kind = IncompleteSnapshotError if gone else SnapshotError
    found = f"{len(changes)} of {len(manifest.files)} files changed: {told}"
    return kind(fault(directory, None, found, "the files that were preserved", f"{then}."))
