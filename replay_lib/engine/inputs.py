"""Everything one replay reads, prepared once: batches, their split, packed micro-batches, routes.

Legend: B rows of a micro-batch, T padded width, N packed tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.attention import Rows, rows_of
from replay_lib.engine.model import LiveModel
from replay_lib.engine.routes import PackedRoutes
from replay_lib.errors import BatchError, fault
from replay_lib.packing import Packed, pack
from replay_lib.routing import check_routes, expand_routes

#: The trainer pads the packed total to this multiple (FP8 kernels want it; AXRL always does it).
ALIGN = 128


@dataclass(frozen=True, kw_only=True)
class RankInput:
    """One recorded data-parallel rank: its batch, its micro-batches, and its routes.

    ``routes_BTLK`` are int16 experts of the MoE layers at every position (placeholders where the
    rollout has none) and ``forced_BTL`` says where the run itself forced them; both are None where
    the run did not replay routes.
    """

    batch: RankBatch
    split: tuple[tuple[int, ...], ...]
    routes_BTLK: Tensor | None
    forced_BTL: Tensor | None


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch as the model reads it, on the model's device."""

    rank: int  # position in the list of replayed ranks
    rows: tuple[int, ...]  # rows of that rank's batch
    tokens: Tensor  # int64 [1, N]
    labels: Tensor  # int64 [N]
    attention_mask: Tensor  # bool [B, T]
    place: Tensor  # int64 [B * T], position of each token among the packed ones (0 off the mask)
    layout: Rows
    experts: Tensor | None  # int16 [L, N, K], saved experts of the MoE layers

    @property
    def size(self) -> int:
        """N, packed tokens."""
        return int(self.tokens.shape[1])


def rank_input(
    batch: RankBatch,
    split: Sequence[Sequence[int]],
    model: LiveModel,
    *,
    replay: bool,
    loss_tokens_only: bool,
) -> RankInput:
    """Check tokens and routes of one rank and expand the routes; refuse what cannot be replayed."""
    if batch.merge_info is not None:
        raise BatchError(
            f"batch of dp rank {batch.dp_rank}: its rows are prefix trees (merge_info); a flat "
            "replay would read them as one sequence. Replaying merged rows is not built yet."
        )
    _check_tokens(batch, model.vocab)
    rows = tuple(tuple(part) for part in split)
    if not replay:
        return RankInput(batch=batch, split=rows, routes_BTLK=None, forced_BTL=None)
    routes = _routes(batch, model)
    expanded = expand_routes(routes, batch.attention_mask)
    forced = torch.ones(expanded.shape[:3], dtype=torch.bool)
    if loss_tokens_only:
        forced &= batch.loss_mask.unsqueeze(-1)
    return RankInput(batch=batch, split=rows, routes_BTLK=expanded, forced_BTL=forced)


def _check_tokens(batch: RankBatch, vocab: int) -> None:
    """Token ids and labels must be rows of the embedding; a device would fail without a word."""
    where = f"batch of dp rank {batch.dp_rank}"
    empty = [row for row, n in enumerate(batch.lengths()) if n == 0]
    if empty:
        raise BatchError(fault(where, f"rows {empty}", "no token at all", "rows of tokens"))
    for name, mask in (("input_ids", batch.attention_mask), ("labels", batch.loss_mask)):
        values = batch.column(name)
        bad = ((values < 0) | (values >= vocab)) & mask
        if bool(bad.any()):
            row, token = (int(x) for x in bad.nonzero()[0])
            raise BatchError(
                fault(
                    where,
                    f"{name} of row {row} token {token}",
                    f"{int(values[row, token])} ({int(bad.sum())} such tokens)",
                    f"0 to {vocab - 1}, the embedding's rows",
                )
            )


def _routes(batch: RankBatch, model: LiveModel) -> list[Tensor]:
    missing = [row for row, routes in enumerate(batch.routes) if routes is None]
    if missing or not batch.routes:
        raise BatchError(
            f"batch of dp rank {batch.dp_rank}: the run replayed routes, but rows "
            f"{missing or 'all'} have none; the trainer refuses such a batch. Replay it with "
            "disable-routing-replay to see the step without routes."
        )
    routes = [r for r in batch.routes if r is not None]
    layers = int(routes[0].shape[1])
    moe = [i for i, is_moe in enumerate(model.moe_layers) if is_moe]
    if layers not in (len(model.moe_layers), len(moe)):
        raise BatchError(
            f"batch of dp rank {batch.dp_rank}: routes have {layers} layers; the model has "
            f"{len(model.moe_layers)} layers, {len(moe)} of them MoE"
        )
    if layers == len(model.moe_layers):
        routes = [r[:, moe] for r in routes]  # dense layers carry dummies
    check_routes(
        routes,
        batch.lengths(),
        layers=len(moe),
        topk=model.topk,
        experts=model.experts,
        where=f"batch of dp rank {batch.dp_rank}",
    )
    return routes


def micro_batches(ranks: Sequence[RankInput], device: torch.device) -> list[MicroBatch]:
    """All micro-batches in the trainer's order, rank after rank, packed on ``device``."""
    out: list[MicroBatch] = []
    for position, rank in enumerate(ranks):
        for rows in rank.split:
            out.append(_micro_batch(position, rank, rows, device))
    return out


def _micro_batch(
    position: int, rank: RankInput, rows: tuple[int, ...], device: torch.device
) -> MicroBatch:
    batch = rank.batch
    mask = batch.attention_mask[list(rows)]
    packed = pack(batch.input_ids[list(rows)], mask, align=ALIGN)
    labels = pack(batch.labels[list(rows)], mask, align=ALIGN)
    return MicroBatch(
        rank=position,
        rows=rows,
        tokens=packed.values.unsqueeze(0).to(device),
        labels=labels.values.to(device),
        attention_mask=mask.to(device),
        place=_places(mask, packed).to(device),
        layout=rows_of([int(x) for x in packed.cu_seqlens.tolist()], device),
        experts=_packed_experts(rank, rows, device),
    )


def _places(mask: Tensor, packed: Packed) -> Tensor:
    first = packed.cu_seqlens[:-1].long().unsqueeze(1)
    return torch.where(mask, first + mask.cumsum(dim=1) - 1, 0).reshape(-1)


def packed_routes(rank: RankInput, forced_BTL: Tensor | None, micro: MicroBatch) -> Any:
    """Routes of a micro-batch for its routers, or None where nothing is forced anywhere.

    Padding behind the last row is forced to the placeholder 0..K-1, as the trainer does, in each
    layer that forces every real token; elsewhere it routes itself.
    """
    if micro.experts is None or forced_BTL is None or not bool(forced_BTL.any()):
        return None
    rows = list(micro.rows)
    forced = pack(forced_BTL[rows], rank.batch.attention_mask[rows], align=ALIGN)
    values = forced.values
    tail = _tail(forced)
    values[tail:] = values[:tail].all(dim=0)
    return PackedRoutes(
        experts=micro.experts,
        forced=values.permute(1, 0).contiguous().to(micro.tokens.device),
    )


def _packed_experts(rank: RankInput, rows: Sequence[int], device: torch.device) -> Tensor | None:
    """Saved experts ``[L, N, K]`` of a micro-batch: the same whatever is forced."""
    if rank.routes_BTLK is None:
        return None
    packed = pack(rank.routes_BTLK[list(rows)], rank.batch.attention_mask[list(rows)], align=ALIGN)
    values = packed.values
    values[_tail(packed) :] = torch.arange(values.shape[-1], dtype=values.dtype)
    return values.permute(1, 0, 2).contiguous().to(device)


def _tail(packed: Packed) -> int:
    """Where the padding behind the last row begins."""
    return int(packed.cu_seqlens[-2]) + packed.lengths[-1]
