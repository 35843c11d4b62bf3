"""Which cases refer to a preserved snapshot."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from replay_lib import layout
from replay_lib.case import Case
from replay_lib.errors import CaseError, UsageError


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
        for what, path in (("snapshot", case.snapshot), ("quiet", case.quiet)):
            if path is not None and _is_in(path, place):
                export = f"spike-replay export {shlex.quote(str(file.parent))} STORE/NAME"
                yield (
                    f"the case {file.parent} refers to it ({what}). Export it to a store of cases "
                    f"({export}) and put that in its place"
                )


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
