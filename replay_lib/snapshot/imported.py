"""What a snapshot made from another trainer's debug dump is, and why it cannot be replayed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replay_lib import layout
from replay_lib.errors import SnapshotError, fault
from replay_lib.snapshot.documents import read_json


class State(StrEnum):
    """Where a field of the snapshot comes from."""

    TAKEN = "taken"  # as the dump has it
    COMPUTED = "computed"  # from what the dump has
    MISSING = "missing"


class ImportedField(BaseModel):
    """One field: ``told`` says what was taken, how it was computed, or what is missing for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    state: State
    told: str


class Imported(BaseModel):
    """``imported.json``: the dump's format and file, and every field that a replay has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    format: str
    source: str
    fields: tuple[ImportedField, ...] = Field(default=())

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of what the dump does not hold."""
        return tuple(one.name for one in self.fields if one.state is State.MISSING)


def read_imported(directory: Path) -> Imported | None:
    """What ``directory`` was imported from; None for a trainer's own. Raises SnapshotError."""
    file = directory / layout.IMPORTED
    if not file.exists():
        return None
    raw = read_json(file, "what the snapshot was imported from")
    try:
        return Imported.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SnapshotError(fault(file, place, f"{first['input']!r:.60}", first["msg"])) from error


def not_to_replay(path: Path, imported: Imported) -> SnapshotError:
    """Why a replay of such a snapshot is refused."""
    return SnapshotError(
        fault(
            path,
            None,
            f"a snapshot imported from a {imported.format} dump, without "
            f"{', '.join(imported.missing)}",
            "a snapshot with weights",
            "doctor, show and analyze work on it; to replay a step, record it with SpikeRecorder "
            "(docs/recorder.md).",
        )
    )


def absent_from(path: Path, imported: Imported, what: str) -> SnapshotError:
    """The error for a part that no dump of that format holds."""
    found = f"no {what}: a {imported.format} dump holds none"
    return SnapshotError(fault(path, None, found, "a trainer's own snapshot"))


def as_document(imported: Imported) -> dict[str, Any]:
    """Plain values for JSON."""
    return imported.model_dump(mode="json")
