"""``portable.json``: the schema version, and size and sha256 of every other file.

When what is verified: opening checks names and sizes of all files and the digests of the two small
ones that it reads; every other file is hashed when it is first read in a process (a batch when it
is loaded, a file of weights when its first tensor is asked for), at some 0.5 to 2 GB/s. So looking
at a large snapshot stays cheap, and nothing unverified is replayed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_lib import __version__, layout
from replay_lib.digests import digest_of
from replay_lib.errors import IncompleteSnapshotError, SnapshotError, fault
from replay_lib.snapshot.documents import COPY_AGAIN, missing
from replay_lib.snapshot.portable.codec import from_bytes, plain_from_bytes, to_bytes

SCHEMA = 1
KIND = "axrl-spike-replay portable snapshot"
#: May lie beside the files: a case that is its own snapshot, and what preserving adds.
BESIDE = frozenset({layout.PORTABLE, layout.CASE_FILE, layout.PRESERVED_MANIFEST})
#: Bytes of a file's name, on every file system in use.
LONGEST_NAME = 255
_WHY = "the list of a portable snapshot's files"
_THEN = "The file was changed or damaged: export the snapshot again, or copy it again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Size in bytes and sha256 (hex) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a portable snapshot in ``directory`` consists of, by file name."""

    directory: Path
    files: Mapping[str, Entry]

    def has(self, name: str) -> bool:
        """Whether the snapshot has a file ``name``."""
        return name in self.files

    def verified(self, name: str, why: str) -> Path:
        """The file ``name`` after its digest was compared; ``why`` says what it is for.

        Raises IncompleteSnapshotError where it is not there, SnapshotError where it differs.
        """
        path = self.directory / name
        if name not in self.files or not path.is_file():
            raise missing(path, why)
        found, stated = digest_of(path), self.files[name].sha256
        if found != stated:
            raise SnapshotError(fault(path, "sha256", found, stated, f"{_THEN}."))
        return path

    def document(self, name: str, why: str) -> Any:
        """The decoded content of the JSON file ``name``, verified."""
        path = self.verified(name, why)
        return from_bytes(path.read_bytes(), path)

    def matching(self, pattern: str) -> list[str]:
        """Names of the snapshot's files that match a glob pattern, sorted."""
        return sorted(name for name in self.files if Path(name).match(pattern))


def read_manifest(directory: Path) -> Manifest:
    """The manifest in ``directory``; every file must be there with its size, and no other.

    The schema version is read first: nothing else of a newer version has a meaning here. Raises
    SnapshotError and IncompleteSnapshotError; digests of files are compared when they are read.
    """
    manifest = manifest_of(directory)
    _check_files(manifest)
    return manifest


def manifest_of(directory: Path) -> Manifest:
    """As :func:`read_manifest`, without looking whether the files are there (again)."""
    path = directory / layout.PORTABLE
    stat = path.stat()
    return Manifest(directory=directory, files=_parsed(path, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _parsed(path: Path, _size: int, _mtime_ns: int) -> dict[str, Entry]:
    raw = plain_from_bytes(path.read_bytes(), path)  # nothing in it is marked
    version = raw.get("schema") if isinstance(raw, dict) else None
    if version != SCHEMA or isinstance(version, bool):
        newer = isinstance(version, int) and version > SCHEMA
        then = "A newer version of this package wrote it: take that one." if newer else None
        raise SnapshotError(fault(path, "schema", repr(version), repr(SCHEMA), then))
    return _entries(raw, path)


def _entries(raw: dict[str, Any], path: Path) -> dict[str, Entry]:
    if raw.get("kind") != KIND:
        raise SnapshotError(fault(path, "kind", repr(raw.get("kind")), repr(KIND)))
    files = raw.get("files")
    if not isinstance(files, dict) or not files:
        raise SnapshotError(fault(path, "files", type(files).__name__, "files by name"))
    entries = {name: _entry(name, stated, path) for name, stated in files.items()}
    if raw.get("sha256") != _own_digest(raw):
        found = repr(raw.get("sha256"))
        raise SnapshotError(fault(path, "sha256", found, f"{_own_digest(raw)}, its own", _THEN))
    return entries


def _entry(name: str, stated: Any, path: Path) -> Entry:
    if not _is_file_name(name) or name in BESIDE:
        found = f"{name!r:.80}"
        raise SnapshotError(fault(path, "files", found, "names of files in the directory"))
    size = stated.get("bytes") if isinstance(stated, dict) else None
    sha256 = stated.get("sha256") if isinstance(stated, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or not isinstance(sha256, str):
        raise SnapshotError(fault(path, f"files.{name}", repr(stated)[:80], "bytes and sha256"))
    return Entry(size=size, sha256=sha256)


def _is_file_name(name: str) -> bool:
    """Whether a file system can have it, and a terminal show it."""
    plain = name not in ("", ".", "..") and not {"/", "\\"} & set(name)
    return plain and name.isprintable() and len(name.encode(errors="replace")) <= LONGEST_NAME


def _check_files(manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = manifest.directory / name
        if not path.is_file():
            raise missing(path, f"a file that {layout.PORTABLE} lists")
        size = path.stat().st_size
        if size < entry.size:
            found, expected = f"{size} bytes", f"{entry.size} bytes"
            raise IncompleteSnapshotError(fault(path, None, found, expected, f"{COPY_AGAIN}."))
        if size > entry.size:
            found, expected = f"{size} bytes", f"{entry.size} bytes"
            raise SnapshotError(fault(path, None, found, expected, f"{_THEN}."))
    extra = sorted(
        p.name
        for p in manifest.directory.iterdir()
        if p.name not in manifest.files and p.name not in BESIDE
    )
    if extra:
        found, expected = f"files it says nothing about: {', '.join(extra)}", "no other file"
        where = manifest.directory / layout.PORTABLE
        raise SnapshotError(fault(where, "files", found, expected, "Move them elsewhere."))


def write_manifest(directory: Path) -> None:
    """List every file of ``directory``; written last, it marks a whole snapshot."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest_of(path)}
        for path in sorted(directory.iterdir())
    }
    raw: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "made_by": f"axrl-spike-replay {__version__}",
        "files": files,
    }
    raw["sha256"] = _own_digest(raw)
    (directory / layout.PORTABLE).write_bytes(to_bytes(raw))


def _own_digest(raw: Mapping[str, Any]) -> str:
    """sha256 of the manifest's other fields: a damaged manifest does not pass for a whole one."""
    rest = {key: value for key, value in raw.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
