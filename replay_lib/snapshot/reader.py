"""How the parts of a snapshot are read: one reader a layout on disk, all behind the same names.

What is above (batches, settings, model fields, weights, writing) asks here and does not know
whether the trainer wrote the files or this library's export did.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from replay_lib.snapshot.model import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.snapshot.routes import Paths


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredBatch:
    """A batch as it lies on disk: routes are still handles.

    ``columns`` are checked tensors. ``paths`` and ``trees`` have one item a row; a tree is AXRL's
    PrefixMergeInfo as plain data. ``where`` is the file that errors name.
    """

    columns: dict[str, Tensor]
    paths: list[Paths | None]
    trees: list[dict[str, Any] | None]
    where: Path


class Reader(Protocol):
    """Reads one layout. Each raises our errors, naming the file, and runs nothing of it."""

    def stored_batch(self, snapshot: Snapshot, dp_rank: int) -> StoredBatch:
        """The batch of data-parallel rank ``dp_rank``."""

    def may_hold_trees(self, snapshot: Snapshot, dp_rank: int) -> bool:
        """False only where no row of that batch can be a prefix tree; needs no torch."""

    def stored_payload(self, snapshot: Snapshot, dp_rank: int) -> list[Tensor] | None:
        """Routes of that batch's distinct handles, ``[rows, L, K]``, of int16, int8 or uint8.

        None where none are stored.
        """

    def trainer_config(self, snapshot: Snapshot) -> dict[str, Any]:
        """The saved GrpoTrainerConfig as nested plain dictionaries."""

    def grad_info(self, snapshot: Snapshot, rank: int) -> Any:
        """Figures of GLOBAL rank ``rank``, unchecked."""

    def grad_info_ranks(self, snapshot: Snapshot) -> list[int]:
        """Global ranks whose figures were saved."""

    def run_config(self, snapshot: Snapshot) -> str:
        """Text of Megatron-Bridge's ``run_config.yaml``."""

    def worker_config(self, snapshot: Snapshot) -> dict[str, Any]:
        """The worker's whole configuration as saved."""


def reader_of(snapshot: Snapshot) -> Reader:
    """The reader of the layout in which ``snapshot`` lies."""
    if snapshot.portable:
        from replay_lib.snapshot.portable import reading

        return reading
    from replay_lib.snapshot import axrl_files

    return axrl_files
