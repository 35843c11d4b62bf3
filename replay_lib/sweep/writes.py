"""Which settings and model fields a method overwrites, told without a batch or a model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from replay_lib.engine.protocol import MitigationCall
from replay_lib.errors import PatchError
from replay_lib.methods import resolve
from replay_lib.patch import Mitigation, Patch, Seam


class _Listener:
    """In the place of loss settings: keeps the names of fields that a patch replaces."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def replace(self, **fields: Any) -> Self:
        self.names |= fields.keys()
        return self


def writes_of(
    calls: Sequence[MitigationCall], methods: Mapping[str, Mitigation]
) -> frozenset[tuple[Seam, str]]:
    """Seam and name of every field that ``calls`` set; of a patch that reads what it is given,
    and so cannot be asked without it, those that it has set until then."""
    patches = [patch for call in calls for patch in resolve(call, methods)]
    return frozenset((patch.seam, name) for patch in patches for name in _names(patch))


def _names(patch: Patch) -> set[str]:
    if patch.seam is Seam.MODEL:
        try:
            return set(patch({}))
        except (PatchError, TypeError):
            return set()
    if patch.seam is not Seam.SETTINGS:
        return set()
    listener = _Listener()
    with contextlib.suppress(PatchError):
        patch(listener)
    return listener.names
