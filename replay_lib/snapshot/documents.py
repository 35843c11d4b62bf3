"""JSON files of a snapshot: read as data, with faults that name the file.

Python's JSON writes NaN and Infinity as bare words, and AXRL's metadata holds them; they are
read as what they say.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.errors import IncompleteSnapshotError, SnapshotError, fault

COPY_AGAIN = (
    "Wait until all ranks have finished writing, or copy the file again from where it was written"
)

NO_TRAINER = (
    "Old versions of the trainer did not save it, and the loss settings are nowhere else. What the "
    "snapshot states and its batches can still be looked at; to replay it, put the trainer.pt of a "
    "newer snapshot of the same run beside it"
)


def missing(path: Path, why: str, then: str = COPY_AGAIN) -> IncompleteSnapshotError:
    """The error for a file that is not there; ``then`` says what can be done."""
    return IncompleteSnapshotError(fault(path, None, "no such file", why, f"{then}."))


def read_text(path: Path, why: str) -> str:
    """UTF-8 text of a regular file; ``why`` says what the file is for."""
    if not path.is_file():
        raise missing(path, why)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = f"bytes that are not text ({error})"
        raise SnapshotError(fault(path, None, found, why, f"{COPY_AGAIN}.")) from error


def read_json(path: Path, why: str) -> dict[str, Any]:
    """The object of a JSON file, bare NaN and Infinity included.

    Raises IncompleteSnapshotError where the file is missing or ends before its object does, and
    SnapshotError where it is no JSON object.
    """
    text = read_text(path, why)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.rstrip().endswith("}"):
            found = f"a file that ends after {len(text)} characters in the middle of its object"
            raise IncompleteSnapshotError(
                fault(path, None, found, why, f"{COPY_AGAIN}.")
            ) from error
        raise SnapshotError(
            fault(path, None, f"broken JSON ({error})", why, f"{COPY_AGAIN}.")
        ) from error
    if not isinstance(value, dict):
        raise SnapshotError(fault(path, None, f"a JSON {type(value).__name__}", why))
    return value


def file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of each file right inside, by name, sorted; what preserving added is left out."""
    with os.scandir(directory) as entries:
        found = {e.name: e.stat().st_size for e in entries if e.is_file()}
    found.pop(layout.PRESERVED_MANIFEST, None)
    return dict(sorted(found.items()))
