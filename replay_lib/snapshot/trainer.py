"""Loss settings out of the saved trainer, and the per-parameter figures of ``grad_info``.

The settings of the loss exist nowhere else in a snapshot.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from replay_lib.errors import SettingsError, SnapshotError, fault
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.reader import reader_of

if TYPE_CHECKING:
    from replay_lib.loss.settings import GrpoSettings

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """Loss settings, and where the file and this version's settings differ by name.

    ``unknown`` are saved keys that this version does not know; their effect on the loss, if
    any, is not modelled. ``defaulted`` are settings that the file does not hold.
    """

    settings: GrpoSettings
    unknown: tuple[str, ...]
    defaulted: tuple[str, ...]


def load_settings(snapshot: Snapshot) -> GrpoSettings:
    """The loss settings of the recorded run; keys of other versions are logged.

    Errors as of :func:`read_settings`.
    """
    saved = read_settings(snapshot)
    if saved.unknown:
        _LOG.warning(
            "%s: settings unknown to this version are not modelled: %s",
            snapshot.trainer_file,
            ", ".join(saved.unknown),
        )
    return saved.settings


def read_settings(snapshot: Snapshot) -> SavedSettings:
    """The loss settings with the names that differ between the file and this version.

    Raises UnsupportedModelError for a trainer that is not AXRL's GrpoTrainer, SettingsError
    where a value is out of range, and SnapshotError where the file cannot be read.
    """
    from replay_lib.loss.settings import GrpoSettings

    path = snapshot.trainer_file
    raw = read_trainer_config(snapshot)
    try:
        fields, unknown, defaulted = _fit(GrpoSettings, raw, "")
        settings = GrpoSettings(**fields)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error
    return SavedSettings(settings=settings, unknown=tuple(unknown), defaulted=tuple(defaulted))


def read_trainer_config(snapshot: Snapshot) -> dict[str, Any]:
    """The saved GrpoTrainerConfig as nested plain dictionaries."""
    return reader_of(snapshot).trainer_config(snapshot)


def _fit(
    model: type[BaseModel], raw: dict[str, Any], prefix: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The part of ``raw`` that ``model`` knows, unknown keys, and fields left at defaults."""
    fields: dict[str, Any] = {}
    unknown = sorted(f"{prefix}{key}" for key in raw if key not in model.model_fields)
    defaulted = [f"{prefix}{name}" for name in model.model_fields if name not in raw]
    for name, field in model.model_fields.items():
        if name not in raw:
            continue
        value, nested = raw[name], field.annotation
        if isinstance(value, dict) and isinstance(nested, type) and issubclass(nested, BaseModel):
            inner, more_unknown, more_defaulted = _fit(nested, value, f"{prefix}{name}.")
            value = nested(**inner)
            unknown += more_unknown
            defaulted += more_defaulted
        fields[name] = value
    return fields, unknown, defaulted


def load_grad_info(snapshot: Snapshot, rank: int) -> dict[str, dict[str, float]]:
    """Figures ``{parameter: {grad_norm, grad_max, param_norm}}`` of GLOBAL rank ``rank``.

    They are taken after clipping, from one rank's shard, and partly unreduced: something to
    look at, never a reference. Raises IncompleteSnapshotError where the trainer saved none.
    """
    found = reader_of(snapshot).grad_info(snapshot, rank)
    well_formed = isinstance(found, dict) and all(
        isinstance(name, str)
        and isinstance(figures, dict)
        and all(isinstance(v, float | int) for v in figures.values())
        for name, figures in found.items()
    )
    if not well_formed:
        where = f"{snapshot.path}: per-parameter figures of rank {rank}"
        raise SnapshotError(
            fault(where, None, type(found).__name__, "figures by parameter and by name")
        )
    return {name: {k: float(v) for k, v in figures.items()} for name, figures in found.items()}
