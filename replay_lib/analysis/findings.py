"""What the doctor can find: one list of codes, and the shape of a finding.

A code is stable: scripts may look for it. Its severity says what it means for a replay: an
``error`` stops it or makes its figures mean something else, a ``warning`` is a likely cause of a
spike or of a figure that is read wrongly, a ``note`` is worth knowing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_lib.analysis.codes import CODES, Code, Severity
from replay_lib.errors import (
    BatchError,
    IncompleteSnapshotError,
    SettingsError,
    SnapshotError,
    SpikeReplayError,
    UnsafePickleError,
    UnsupportedModelError,
    WeightsError,
)

__all__ = ["CODES", "Code", "Finding", "Place", "Severity", "finding", "from_error"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a batch: recorded data-parallel rank, row, token and transformer layer, from 0."""

    dp_rank: int | None = None
    row: int | None = None
    token: int | None = None
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found: ``found`` is a sentence with the figures, ``then`` what to do about it."""

    code: str
    severity: Severity
    file: str
    found: str
    then: str
    dp_rank: int | None = None
    row: int | None = None
    token: int | None = None
    layer: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; places that do not apply are null."""
        return {
            name: value.value if isinstance(value, enum.Enum) else value
            for name, value in vars(self).items()
        }


NOWHERE = Place()


def finding(code: str, file: str | Path, found: str, at: Place = NOWHERE) -> Finding:
    """A finding of a known ``code`` in ``file`` (its name alone is kept)."""
    known = CODES[code]
    return Finding(
        code=code,
        severity=known.severity,
        file=Path(file).name,
        found=found,
        then=known.then,
        **vars(at),
    )


#: The most derived class first.
_CODE_OF_ERROR: tuple[tuple[type[SpikeReplayError], str], ...] = (
    (UnsafePickleError, "pickle-unsafe"),
    (IncompleteSnapshotError, "file-incomplete"),
    (SnapshotError, "file-broken"),
    (BatchError, "batch-broken"),
    (SettingsError, "settings-refused"),
    (WeightsError, "weights-refused"),
    (UnsupportedModelError, "model-unsupported"),
)


def from_error(error: SpikeReplayError, file: str | Path, at: Place = NOWHERE) -> Finding:
    """A reader's refusal as a finding; its text names the field."""
    known = (code for kind, code in _CODE_OF_ERROR if isinstance(error, kind))
    code = next(known, "file-broken")
    return finding(code, file, str(error), at)
