"""Which cases refer to a preserved snapshot."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from replay_lib import layout
from replay_lib.case import Case
from replay_lib.errors import CaseError, UsageError

_EXPERIMENT = "the experiment"


def referring(preserved: Path, directories: Sequence[Path]) -> Iterator[str]:
    """Reasons not to delete ``preserved``: a case below one of ``directories`` refers to it.

    A case refers to what its paths lead to, links followed. Another name of the same file (a
    hardlink) is no reference: it lives on by itself. A case that cannot be read may refer to
    anything, and is a reason too. UsageError where a directory is absent.
    """
    place = preserved.resolve()
    for file in _case_files(directories):
        try:
            case = Case.load(file)
        except CaseError as error:
            first = str(error).splitlines()[0]
            yield f"the case {file.parent} cannot be read, and may refer to it ({first})"
            continue
        found = (what for what, path in _named(case, file.parent) if _is_in(path, place))
        for what in dict.fromkeys(found):
            export = f"spike-replay export {shlex.quote(str(file.parent))} STORE/NAME"
            then = f"Export it to a store of cases ({export}) and put that in its place"
            if what.startswith(_EXPERIMENT):
                then = "An export does not take that along: copy it, and name the copy"
            yield f"the case {file.parent} refers to it ({what}). {then}"


def _named(case: Case, directory: Path) -> Iterator[tuple[str, Path]]:
    """What a case reads: its snapshots, links in them, and what may be paths given to methods."""
    own = {"snapshot": case.snapshot} | ({} if case.quiet is None else {"quiet": case.quiet})
    yield from own.items()
    for what, path in own.items():
        yield from ((f"a link in its {what}", p) for p in path.rglob("*") if p.is_symlink())
    for name in case.expected:
        for text in re.findall(r"=([^,+]+)", name):
            yield f"{_EXPERIMENT} {name}", directory / text


def _case_files(directories: Sequence[Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"--cases {directory}: found no such directory, expected cases")
        found |= dict.fromkeys(sorted(_below(directory)))
    return list(found)


def _below(directory: Path) -> Iterator[Path]:
    """Case files at any depth, as pytest collects them; links to directories are followed."""
    seen: set[Path] = set()
    for above, names, files in os.walk(directory, followlinks=True):
        place = Path(above)
        known = place.resolve() in seen  # a loop of links
        seen.add(place.resolve())
        names[:] = [] if known else [n for n in names if not n.startswith(".")]
        if layout.CASE_FILE in files and not known:
            yield place / layout.CASE_FILE


def _is_in(path: Path, place: Path) -> bool:
    resolved = path.resolve()
    return resolved == place or place in resolved.parents
