"""A data-parallel rank's batch as a :class:`~replay_lib.batch.RankBatch`.

Columns are checked for dtype and shape and are never converted. Routes come from the payload
of the same rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError, fault
from replay_lib.merged import MergedRow
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.reader import StoredBatch, reader_of
from replay_lib.snapshot.routes import Handle, Paths, payload_by_handle, tie

if TYPE_CHECKING:
    from torch import Tensor


def load_batch(snapshot: Snapshot, dp_rank: int) -> RankBatch:
    """The batch of data-parallel rank ``dp_rank`` (0..dp-1) on the CPU, with its routes.

    Rows that are prefix trees are marked in ``merge_info`` (a MergedRow) and have no routes of
    their own. Raises BatchError for a column or a payload of the wrong dtype, shape or count,
    and the errors of reading an untrusted file.
    """
    stored = reader_of(snapshot).stored_batch(snapshot, dp_rank)
    payload = _payload(snapshot, dp_rank, stored)
    routes, merged = _split(tie(stored.paths, payload), stored.trees)
    batch = RankBatch(
        dp_rank=dp_rank,
        routes=tuple(routes),
        merge_info=tuple(merged) if any(merged) else None,
        **stored.columns,
    )
    _check_mask(batch, stored.where)
    return batch


def load_columns(snapshot: Snapshot, dp_rank: int) -> tuple[RankBatch, list[Paths | None]]:
    """The batch without its routes, and the handles of each row by path.

    The routes are the larger part of a rank by far; :func:`load_payload` reads them later, when
    the columns are no longer held. ``merge_info`` is None here. Errors as of :func:`load_batch`.
    """
    stored = reader_of(snapshot).stored_batch(snapshot, dp_rank)
    batch = RankBatch(dp_rank=dp_rank, routes=(), merge_info=None, **stored.columns)
    _check_mask(batch, stored.where)
    return batch, stored.paths


def load_payload(
    snapshot: Snapshot, dp_rank: int, paths: Sequence[Paths | None]
) -> dict[Handle, Tensor]:
    """The routes of each distinct handle among ``paths``, ``[n, L, K]``, as stored.

    Errors as of :func:`load_batch`.
    """
    payload = reader_of(snapshot).stored_payload(snapshot, dp_rank)
    place = snapshot.routing_file(dp_rank)
    return payload_by_handle(paths, payload, place, lost=snapshot.legacy)


def load_handles(
    snapshot: Snapshot, dp_rank: int
) -> tuple[list[Paths | None], dict[Handle, Tensor]]:
    """Handles of each row by path, and the routes of each, as stored.

    Errors as of :func:`load_batch`.
    """
    stored = reader_of(snapshot).stored_batch(snapshot, dp_rank)
    return stored.paths, _payload(snapshot, dp_rank, stored)


def payload_counts(snapshot: Snapshot) -> dict[int, int]:
    """Routing payloads of each data-parallel rank, counted in the files."""
    reader = reader_of(snapshot)
    ranks = range(snapshot.parallel.dp)
    return {d: len(reader.stored_payload(snapshot, d) or ()) for d in ranks}


def _payload(snapshot: Snapshot, dp_rank: int, stored: StoredBatch) -> dict[Handle, Tensor]:
    return load_payload(snapshot, dp_rank, stored.paths)


def _split(
    by_path: list[list[Tensor] | None], trees: list[dict[str, Any] | None]
) -> tuple[list[Tensor | None], list[MergedRow | None]]:
    """Routes of plain rows, and the rows that have a tree or several paths."""
    routes: list[Tensor | None] = []
    merged: list[MergedRow | None] = []
    for paths, tree in zip(by_path, trees, strict=True):
        several = tree is not None or (paths is not None and len(paths) > 1)
        merged.append(MergedRow(path_routes=tuple(paths or ()), tree=tree) if several else None)
        routes.append(paths[0] if paths and not several else None)
    return routes, merged


def _check_mask(batch: RankBatch, path: Path) -> None:
    """Real tokens come first: everything downstream relies on it."""
    import torch

    lengths = batch.attention_mask.sum(dim=1, keepdim=True)
    front = torch.arange(batch.width) < lengths
    holes = (front != batch.attention_mask).any(dim=1)
    if bool(holes.any()):
        row = int(holes.nonzero()[0])
        raise BatchError(
            fault(path, f"attention_mask of row {row}", "a hole", "real tokens first, then padding")
        )
