"""Everything one replay reads, prepared once: batches, their split, packed micro-batches, routes.

Legend: B rows of a micro-batch, T padded width, N packed tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.attention import Rows, rows_of
from replay_lib.engine.model import LiveModel
from replay_lib.engine.parts import WHOLE, Part
from replay_lib.engine.routes import PackedRoutes
from replay_lib.engine.trees import (
    PADDING,
    Packing,
    TreeRow,
    lengthened,
    pack_merged,
    pack_paths,
    row_routes,
    tree_rows_of,
)
from replay_lib.errors import BatchError, fault
from replay_lib.packing import Packed, pack
from replay_lib.routing import check_routes, compose_padding, expand_routes


@dataclass(frozen=True, kw_only=True)
class RankInput:
    """One recorded data-parallel rank: its batch, its micro-batches, and its routes.

    ``routes_BTLK`` are int16 experts of the MoE layers at every position (placeholders where the
    rollout has none) and ``forced_BTL`` says where the run itself forced them; both are None where
    the run did not replay routes. ``trees`` are the rows again where some of them are merged
    (empty: none is), with the routes of each path.
    """

    batch: RankBatch
    split: tuple[tuple[int, ...], ...]
    routes_BTLK: Tensor | None
    forced_BTL: Tensor | None
    trees: tuple[TreeRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch as the model reads it, on the model's device.

    A rank may have a part of the packed tokens and of the layers (``part``): ``tokens`` and
    ``labels`` are the n that its model reads, ``experts`` those that its routers are asked for.
    The rest is of the whole micro-batch.
    """

    rank: int  # position in the list of replayed ranks
    rows: tuple[int, ...]  # rows of that rank's batch; none in an idle step
    tokens: Tensor  # int64 [1, n]
    labels: Tensor  # int64 [n]
    attention_mask: Tensor  # bool [B, T]
    place: Tensor  # int64 [B * T], position of each token among the packed ones (0 off the mask)
    layout: Rows
    experts: Tensor | None  # int16 [L, N, K], saved experts of the MoE layers
    origin: Tensor | None = None  # of merged rows: int64 [N] into [B * T], PADDING; on the CPU
    part: Part = WHOLE

    @property
    def size(self) -> int:
        """n, packed tokens that this rank's model reads."""
        return int(self.tokens.shape[1])

    @property
    def idle(self) -> bool:
        """Whether this is a step that adds nothing, taken only because other ranks take one."""
        return not self.rows


def rank_input(
    batch: RankBatch,
    split: Sequence[Sequence[int]],
    model: LiveModel,
    *,
    replay: bool,
    loss_tokens_only: bool,
) -> RankInput:
    """Check tokens and routes of one rank and expand the routes; refuse what cannot be replayed.

    A batch in which no row has routes routes itself, whatever ``replay`` says, as in the trainer.
    """
    replay = replay and has_routes(batch)
    _check_tokens(batch, model.vocab)
    rows = tuple(tuple(part) for part in split)
    trees = () if batch.merge_info is None else tree_rows_of(batch, routes=replay)
    if not replay:
        trees = tuple(dataclasses.replace(t, path_routes=()) for t in trees)
        return RankInput(batch=batch, split=rows, routes_BTLK=None, forced_BTL=None, trees=trees)
    if trees:
        trees = _tree_routes(batch, trees, model)
        routes = [row_routes(t) for t in trees]
    else:
        routes = _routes(batch, model)
    expanded = expand_routes(routes, batch.attention_mask)
    forced = torch.ones(expanded.shape[:3], dtype=torch.bool)
    if loss_tokens_only:
        forced &= batch.loss_mask.unsqueeze(-1)
    return RankInput(batch=batch, split=rows, routes_BTLK=expanded, forced_BTL=forced, trees=trees)


def has_routes(batch: RankBatch) -> bool:
    """Whether any row of ``batch`` has routes: the trainer's own switch, beside its setting."""
    merged = any(row is not None and row.path_routes for row in batch.merge_info or ())
    return merged or any(routes is not None for routes in batch.routes)


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
    where = f"batch of dp rank {batch.dp_rank}"
    _refuse_missing(where, [row for row, routes in enumerate(batch.routes) if routes is None])
    routes = compose_padding([r for r in batch.routes if r is not None], batch.index)
    return _moe_routes(routes, batch.lengths(), model, where=where, unit="row")


def _tree_routes(
    batch: RankBatch, trees: Sequence[TreeRow], model: LiveModel
) -> tuple[TreeRow, ...]:
    """The rows with the routes of their MoE layers, each path's checked by itself."""
    where = f"batch of dp rank {batch.dp_rank}"
    _refuse_missing(where, [row for row, tree in enumerate(trees) if not tree.path_routes])
    found: list[TreeRow] = []
    for row, (tree, length) in enumerate(zip(trees, batch.lengths(), strict=True)):
        lengths = tree.tree.lengths if tree.tree else [length]
        routes = _moe_routes(
            tree.path_routes, lengths, model, where=f"{where}: row {row}", unit="path"
        )
        found.append(dataclasses.replace(tree, path_routes=tuple(routes)))
    return tuple(found)


def _refuse_missing(where: str, missing: list[int]) -> None:
    if missing:
        raise BatchError(
            f"{where}: the run replayed routes, but rows {missing} have none; the trainer refuses "
            "such a batch. Replay it with disable-routing-replay to see the step without routes."
        )


def _moe_routes(
    routes: Sequence[Tensor], lengths: Sequence[int], model: LiveModel, *, where: str, unit: str
) -> list[Tensor]:
    """Routes of the MoE layers, checked; dense layers carry dummies that are dropped."""
    layers = int(routes[0].shape[1])
    moe = [i for i, is_moe in enumerate(model.moe_layers) if is_moe]
    if layers not in (len(model.moe_layers), len(moe)):
        raise BatchError(
            f"{where}: routes have {layers} layers; the model has "
            f"{len(model.moe_layers)} layers, {len(moe)} of them MoE"
        )
    kept = [r[:, moe] for r in routes] if layers == len(model.moe_layers) else list(routes)
    check_routes(
        kept,
        lengths,
        layers=len(moe),
        topk=model.topk,
        experts=model.experts,
        where=where,
        unit=unit,
    )
    return kept


def micro_batches(
    ranks: Sequence[RankInput],
    device: torch.device,
    part: Part = WHOLE,
    *,
    unmerged: bool = False,
) -> list[MicroBatch]:
    """All micro-batches in the trainer's order, rank after rank, packed on ``device``.

    ``unmerged`` packs the paths of merged rows, each as a row of its own, instead of their trees.
    The split stays that of the recorded rows: all paths of one are in its micro-batch. ``part`` is
    what this rank has of each.
    """
    out: list[MicroBatch] = []
    for position, rank in enumerate(ranks):
        for rows in rank.split:
            if rank.trees:
                packing = _tree_packing(rank, rows, device, part, unmerged=unmerged)
                whole = _gathered(position, rank, rows, packing)
            else:
                whole = _micro_batch(position, rank, rows, device, align=part.align)
            out.append(own_part(whole, part))
    return out


def idle_step(device: torch.device, part: Part) -> MicroBatch:
    """One row of zero tokens, for a rank that has run out of micro-batches before others."""
    zeros = torch.zeros(part.align, dtype=torch.int64, device=device)
    whole = MicroBatch(
        rank=-1,
        rows=(),
        tokens=zeros.unsqueeze(0),
        labels=zeros,
        attention_mask=torch.ones(1, part.align, dtype=torch.bool, device=device),
        place=torch.arange(part.align, device=device),
        layout=rows_of([0, part.align], device),
        experts=None,
    )
    return own_part(whole, part)


def own_part(whole: MicroBatch, part: Part) -> MicroBatch:
    """What a rank with ``part`` has of the micro-batch ``whole``."""
    if part is WHOLE:
        return whole
    experts = whole.experts
    if experts is not None:
        experts = part.routed(experts.permute(1, 0, 2)).permute(1, 0, 2).contiguous()
    return dataclasses.replace(
        whole,
        tokens=part.read(whole.tokens[0]).unsqueeze(0),
        labels=part.read(whole.labels),
        layout=dataclasses.replace(
            whole.layout, positions=part.read(whole.layout.positions), context=part.context
        ),
        experts=experts,
        part=part,
    )


def _micro_batch(
    position: int, rank: RankInput, rows: tuple[int, ...], device: torch.device, *, align: int
) -> MicroBatch:
    batch = rank.batch
    mask = batch.attention_mask[list(rows)]
    packed = pack(batch.input_ids[list(rows)], mask, align=align)
    labels = pack(batch.labels[list(rows)], mask, align=align)
    return MicroBatch(
        rank=position,
        rows=rows,
        tokens=packed.values.unsqueeze(0).to(device),
        labels=labels.values.to(device),
        attention_mask=mask.to(device),
        place=_places(mask, packed).to(device),
        layout=rows_of([int(x) for x in packed.cu_seqlens.tolist()], device),
        experts=_packed_experts(rank, rows, device, align=align),
    )


def _tree_packing(
    rank: RankInput, rows: tuple[int, ...], device: torch.device, part: Part, *, unmerged: bool
) -> Packing:
    if unmerged:
        return pack_paths(rank.batch, rows, rank.trees, device, align=part.align)
    packing = pack_merged(rank.batch, rows, rank.trees, device)
    return lengthened(packing, part.context.size * part.tensor.size)


def _gathered(
    position: int, rank: RankInput, rows: tuple[int, ...], packing: Packing
) -> MicroBatch:
    """A micro-batch of rows that stand where ``packing`` says; padding has token and label 0."""
    device = packing.layout.positions.device

    def gather(column: Tensor) -> Tensor:
        values = column[list(rows)].flatten()[packing.origin.clamp(min=0)]
        return torch.where(packing.origin == PADDING, 0, values).to(device)

    experts = packing.experts
    return MicroBatch(
        rank=position,
        rows=rows,
        tokens=gather(rank.batch.input_ids).unsqueeze(0),
        labels=gather(rank.batch.labels),
        attention_mask=rank.batch.attention_mask[list(rows)].to(device),
        place=packing.place.to(device),
        layout=packing.layout,
        experts=None if experts is None else experts.permute(1, 0, 2).contiguous().to(device),
        origin=packing.origin,
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
    values = _packed_forced(rank, forced_BTL[list(micro.rows)], micro)
    real = _packed_real(rank, micro).unsqueeze(1)
    every = real.expand(-1, values.shape[1])  # cut as values are
    return PackedRoutes(
        real=micro.part.routed(every)[:, 0].to(micro.tokens.device),
        experts=micro.experts,
        forced=micro.part.routed(values).permute(1, 0).contiguous().to(micro.tokens.device),
    )


def _packed_forced(rank: RankInput, forced_BTL: Tensor, micro: MicroBatch) -> Tensor:
    """bool ``[N, L]``; padding is forced in the layers that force every real token."""
    if micro.origin is not None:
        padding = micro.origin == PADDING
        values = forced_BTL.flatten(0, 1)[micro.origin.clamp(min=0)]
        values[padding] = values[~padding].all(dim=0)
        return values
    forced = pack(forced_BTL, rank.batch.attention_mask[list(micro.rows)], align=micro.part.align)
    tail = _tail(forced)
    forced.values[tail:] = forced.values[:tail].all(dim=0)
    return forced.values


def _packed_real(rank: RankInput, micro: MicroBatch) -> Tensor:
    """bool ``[N]``: packed tokens that are no padding."""
    if micro.origin is not None:
        return micro.origin != PADDING
    mask = rank.batch.attention_mask[list(micro.rows)]
    packed = pack(mask, mask, align=micro.part.align)
    return torch.arange(len(packed.values)) < _tail(packed)


def _packed_experts(
    rank: RankInput, rows: Sequence[int], device: torch.device, *, align: int
) -> Tensor | None:
    """Saved experts ``[L, N, K]`` of a micro-batch: the same whatever is forced."""
    if rank.routes_BTLK is None:
        return None
    packed = pack(rank.routes_BTLK[list(rows)], rank.batch.attention_mask[list(rows)], align=align)
    values = packed.values
    values[_tail(packed) :] = torch.arange(values.shape[-1], dtype=values.dtype)
    return values.permute(1, 0, 2).contiguous().to(device)


def _tail(packed: Packed) -> int:
    """Where the padding behind the last row begins."""
    return int(packed.cu_seqlens[-2]) + packed.lengths[-1]
