"""Every error this library raises on purpose.

    SpikeReplayError
    ├── SnapshotError              a snapshot on disk cannot be used as it is
    │   ├── IncompleteSnapshotError    a file is missing or cut short
    │   └── UnsafePickleError          a pickle asks for a global that is not on the allow-list
    ├── UnsupportedModelError      the saved model has a field that this engine does not model
    ├── WeightsError               checkpoint and model disagree about their parameters
    ├── BatchError                 a batch or its routes have the wrong shape, range or columns
    ├── SettingsError              a loss setting is unknown, out of range or contradicts another
    ├── PatchError                 a mitigation is unknown, has wrong parameters or broke its seam
    ├── TrainerError               a trainer cannot be loaded or broke its contract
    ├── CaseError                  a case.yaml is malformed or points nowhere
    ├── EngineError                the worker process failed, died, hung or ran out of memory
    ├── NodeError                  a GPU node cannot be reached or used, or was lost on the way
    └── UsageError                 a command was called with something it cannot take

Each has a stable ``code`` (used in JSON output) and an ``exit_code`` (used by the command line).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path


class SpikeReplayError(Exception):
    """Base of all errors of this library; its text is meant to be read by a user."""

    code = "error"
    exit_code = 1


class SnapshotError(SpikeReplayError):
    """A snapshot on disk cannot be used as it is."""

    code = "snapshot"
    exit_code = 3


class IncompleteSnapshotError(SnapshotError):
    """A file of the snapshot is missing or cut short (ranks write without a barrier)."""

    code = "snapshot_incomplete"


class UnsafePickleError(SnapshotError):
    """A pickle asks for a global that is not on the allow-list; nothing of it was run."""

    code = "snapshot_unsafe"


class UnsupportedModelError(SpikeReplayError):
    """The saved model has a field that this engine does not model."""

    code = "model_unsupported"
    exit_code = 4


class WeightsError(SpikeReplayError):
    """Checkpoint and model disagree about names or shapes of their parameters."""

    code = "weights"
    exit_code = 4


class BatchError(SpikeReplayError):
    """A batch or its routes have the wrong shape, range or columns."""

    code = "batch"
    exit_code = 4


class SettingsError(SpikeReplayError):
    """A loss setting is unknown, out of range or contradicts another one."""

    code = "settings"
    exit_code = 4


class PatchError(SpikeReplayError):
    """A mitigation is unknown, has wrong parameters or broke the contract of its seam."""

    code = "patch"
    exit_code = 5


class TrainerError(SpikeReplayError):
    """A trainer cannot be loaded, or what its loss returned is not what it should be."""

    code = "trainer"
    exit_code = 5


class CaseError(SpikeReplayError):
    """A case.yaml is malformed or points to something that is not there."""

    code = "case"
    exit_code = 3


class EngineError(SpikeReplayError):
    """The worker process failed, died, hung or ran out of memory."""

    code = "engine"
    exit_code = 6


class NodeError(SpikeReplayError):
    """A GPU node cannot be reached or used, or the connection to it was lost."""

    code = "node"
    exit_code = 6


class UsageError(SpikeReplayError):
    """A command was called with something it cannot take."""

    code = "usage"
    exit_code = 2


def fault(
    where: str | Path, field: str | None, found: str, expected: str, then: str | None = None
) -> str:
    """Compose the one text that every error about an input has.

    ``where`` is the file (or object), ``field`` the place in it, then what was found, what was
    expected, and what the reader can do about it.
    """
    place = f"{where}: {field}" if field else f"{where}"
    text = f"{place}: found {found}, expected {expected}"
    return f"{text}. {then}" if then else text


def not_allowed(error: PermissionError) -> UsageError:
    """The error of a file or directory that this user may not read, or not write."""
    where = "a file" if error.filename is None else os.fsdecode(error.filename)
    told = repr(error.strerror or str(error))
    then = "Ask its owner, or take a copy that you may read"
    return UsageError(fault(where, None, told, "a place that you have the right to use", then))


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """``did you mean a, b or c?``: what is spelled nearest to ``name``; None where nothing is."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.7)
    if not near:
        return None
    *first, last = near
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"


def number_hint(found: object) -> str | None:
    """What to do about a number without a point, as in 1e-5: YAML 1.1 reads it as text."""
    is_number = isinstance(found, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", found)
    return f"YAML reads {found} as text: write it with a point, as in 1.0e-5" if is_number else None
