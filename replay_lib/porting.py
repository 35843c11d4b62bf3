"""Cases and snapshots without a pickle, and back: what ``export`` and ``import`` do.

A bare snapshot becomes one directory. A case stays a case: its ``case.yaml`` goes along, with its
name, its snapshot, its quiet control and the digests of the files that are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from replay_lib import layout
from replay_lib.case import Case
from replay_lib.case_files import seal
from replay_lib.errors import SnapshotError, UsageError, fault
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.unfinished import clear_leftovers

Convert = Callable[[Snapshot, Path], Snapshot]
Name = Callable[[Snapshot], str]


@dataclass(frozen=True, kw_only=True)
class Ported:
    """What was written: the new directory, and each snapshot in it.

    ``cleared`` are hidden directories beside it, left by commands that were killed and removed now.
    """

    directory: Path
    snapshots: tuple[Snapshot, ...]
    cleared: tuple[Path, ...] = ()

    @property
    def files(self) -> int:
        """Files of all snapshots."""
        return sum(len(snapshot.sizes) for snapshot in self.snapshots)

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return sum(snapshot.size for snapshot in self.snapshots)


def export_case(path: str | Path, out: str | Path) -> Ported:
    """Write the snapshot or case at ``path`` without a pickle as the new directory ``out``.

    All of it is there in the end, or nothing. Raises SnapshotError where ``out`` exists, and the
    errors of reading what is exported.
    """
    from replay_lib.snapshot.portable.writing import export_snapshot

    return _port(Path(path), Path(out), export_snapshot, lambda _: "")


def import_case(path: str | Path, out: str | Path) -> Ported:
    """Write the portable snapshot or case at ``path`` in the trainer's layout as ``out``.

    UsageError where a snapshot of it is in that layout already; else as :func:`export_case`.
    """
    from replay_lib.snapshot.portable.writing import import_snapshot

    return _port(Path(path), Path(out), import_snapshot, lambda s: f"/{layout.iter_dir(s.step)}")


def _port(path: Path, out: Path, convert: Convert, inside: Name) -> Ported:
    if out.exists():  # said before anything is read
        raise SnapshotError(fault(out, None, "a directory that exists", "a new name"))
    case = Case.open(path)
    case.require()
    cleared = tuple(clear_leftovers(out.absolute().parent))
    if case.file is None:
        written = (convert(open_snapshot(case.snapshot), out),)
        return Ported(directory=out, snapshots=written, cleared=cleared)
    return replace(_port_case(case, case.file, out, convert, inside), cleared=cleared)


def _port_case(case: Case, file: Path, out: Path, convert: Convert, inside: Name) -> Ported:
    from replay_lib.snapshot.write import whole_directory

    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):  # Case.open has read it
        raise UsageError(fault(file, None, type(content).__name__, "a mapping"))
    content.pop("sha256", None)
    content.pop("name", None)
    if case.name != out.absolute().name:  # a directory's name is that of the case in it
        content = _after_snapshot(content, case.name)
    kinds = {"snapshot": case.snapshot} | ({"quiet": case.quiet} if case.quiet else {})
    with whole_directory(out) as temporary:
        for kind, place in kinds.items():
            opened = open_snapshot(place)
            content[kind] = f"{kind}{inside(opened)}"
            convert(opened, temporary / content[kind])
        text = yaml.safe_dump(content, sort_keys=False, width=96, allow_unicode=True)
        (temporary / layout.CASE_FILE).write_text(text, encoding="utf-8")
        seal(temporary)
    written = tuple(open_snapshot(out / content[kind]) for kind in kinds)
    return Ported(directory=out, snapshots=written)


def _after_snapshot(content: dict[str, Any], name: str) -> dict[str, Any]:
    """``content`` with the case's name, near the top where a reader looks for it."""
    head = {key: content[key] for key in ("schema", "snapshot") if key in content}
    return head | {"name": name} | content
