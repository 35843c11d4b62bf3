"""A step's rows divided over data-parallel ranks as the trainer does it.

Padding rows are added until the number of rows is a multiple of the ranks, all rows are shuffled by
the run's seed, and rank r gets rows r, r + dp, r + 2 dp, ... Source: AXRL
``global_batch_iterator.build_global_batches_for_dp_rank``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch

IGNORE = -100


def divide(
    batches: Sequence[RankBatch], dp: int, *, seed: int, padding_length: int
) -> list[RankBatch]:
    """The rows of ``batches`` (those of the ranks that had them before) over ``dp`` ranks."""
    whole = _joined(batches)
    missing = -whole.rows % dp
    if missing:
        whole = _joined([whole, _padding(whole, missing, padding_length)])
    order = torch.randperm(whole.rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return [replace(whole.select(order[rank::dp]), dp_rank=rank) for rank in range(dp)]


def _joined(batches: Sequence[RankBatch]) -> RankBatch:
    width = max(b.width for b in batches)
    columns: dict[str, Any] = {}
    for name in TOKEN_COLUMNS + ROW_COLUMNS:
        values = [getattr(b, name) for b in batches]
        if values[0] is None:
            continue
        if name in TOKEN_COLUMNS:
            values = [F.pad(v, (0, width - v.shape[1]), value=_filler(name)) for v in values]
        columns[name] = torch.cat(values)
    routes = tuple(route for b in batches for route in b.routes)
    return replace(batches[0], **columns, routes=routes)


def _filler(name: str) -> int:
    return IGNORE if name == "labels" else -1 if name == "turn_index" else 0


def _padding(like: RankBatch, rows: int, length: int) -> RankBatch:
    """Rows of ``length`` zero tokens that train nothing, with the placeholder routes 0..K-1."""
    blank = like.select([0] * rows)
    columns: dict[str, Any] = {
        name: torch.full_like(getattr(blank, name), _filler(name))
        for name in TOKEN_COLUMNS + ROW_COLUMNS
        if getattr(blank, name) is not None
    }
    columns["attention_mask"][:, :length] = True
    columns["index"] = torch.full_like(blank.index, -1)
    if blank.trajectory_id is not None:
        columns["trajectory_id"] = torch.full_like(blank.trajectory_id, -1)
    if blank.position_ids is not None:
        columns["position_ids"] = blank.position_ids
    routes: tuple[Tensor | None, ...] = ()
    if blank.routes and blank.routes[0] is not None:
        _, layers, topk = blank.routes[0].shape
        route = torch.arange(topk, dtype=torch.int16).expand(length - 1, layers, topk).contiguous()
        routes = (route,) * rows
    return replace(blank, **columns, routes=routes)
