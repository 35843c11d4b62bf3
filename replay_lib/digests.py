"""sha256 of a case's files: what was embedded is what is replayed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from replay_lib import layout
from replay_lib.errors import CaseError, fault

THEN = "Restore the file; if the change is meant, seal the case anew (replay_lib.case_files.seal)"


def digest_of(file: Path) -> str:
    """sha256 in hex; a file that did not change is read once in a process."""
    stat = file.stat()
    return _read(file, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _read(file: Path, _size: int, _mtime_ns: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def digests(root: Path, directories: Iterable[str]) -> dict[str, str]:
    """Digests of all files under ``directories``, by their path relative to ``root``."""
    return {
        f"{directory}/{file.relative_to(root / directory).as_posix()}": digest_of(file)
        for directory in directories
        for file in snapshot_files(root / directory)
    }


def check_digests(case_file: Path, directories: Iterable[Path], stated: Mapping[str, str]) -> None:
    """CaseError with every file that is altered, absent or not stated; ``stated`` empty: no check.

    ``stated`` has the digests by path relative to ``case_file``'s directory, ``directories`` are
    the snapshots, whose files it must name all. A large case is read at some 0.5 GB/s or more,
    which is little beside loading it.
    """
    wrong = [
        fault(case_file, f"sha256.{each.name}", each.found, each.stated, THEN)
        if each.stated
        else fault(case_file, "sha256", f"nothing about {each.name}", _EVERY, THEN)
        for each in broken_seals(case_file, directories, stated)
    ]
    if wrong:
        raise CaseError("\n".join(wrong))


_EVERY = "every file of a snapshot"


class BrokenSeal(NamedTuple):
    """A file that is not as it was sealed: ``stated`` is its digest, empty where none is."""

    name: str
    found: str
    stated: str


def broken_seals(
    case_file: Path, directories: Iterable[Path], stated: Mapping[str, str]
) -> list[BrokenSeal]:
    """What :func:`check_digests` raises, as values; none where nothing is ``stated``."""
    if not stated:
        return []
    root = case_file.parent
    listed = {_place(root / name): name for name in stated}
    wrong = [
        BrokenSeal(name, found, stated[name])
        for place, name in listed.items()
        if (found := digest_of(place) if place.is_file() else "no such file") != stated[name]
    ]
    for directory in directories:
        extra = [file for file in snapshot_files(directory) if _place(file) not in listed]
        wrong += [BrokenSeal(str(file), "a file", "") for file in extra]
    return wrong


def joint_digest(
    case_file: Path | None, directories: Mapping[str, Path], stated: Mapping[str, str]
) -> str:
    """One sha256 for all files of ``directories``, which are keyed by their role in a case.

    It depends on the files' content, their paths inside their directory and the roles. A digest
    that ``stated`` has (by path relative to ``case_file``'s directory) is taken as it is; any other
    file is read, once a process.
    """
    known = (
        {} if case_file is None else {_place(case_file.parent / n): d for n, d in stated.items()}
    )
    lines = [
        f"{known.get(_place(file)) or digest_of(file)} {role}/{file.relative_to(directory)}"
        for role, directory in sorted(directories.items())
        for file in snapshot_files(directory)
    ]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def snapshot_files(directory: Path) -> list[Path]:
    """Files of a snapshot; what preserving adds is none, it changes while digests are filled in."""
    added = directory / layout.PRESERVED_MANIFEST
    return sorted(file for file in directory.rglob("*") if file.is_file() and file != added)


def _place(file: Path) -> Path:
    """One spelling of where a file lies; a link in the last part stays one."""
    return file.parent.resolve() / file.name
