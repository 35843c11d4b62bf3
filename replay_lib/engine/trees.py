"""Micro-batches of merged rows, as the trainer packs them or one row a path.

Merged: each row's ``total_padded`` tokens, row after row, with the attention of its tree and the
placeholder experts on padding (AXRL ``magi_forward``, ``pack_routing_for_magi``). Unmerged: the
paths of each row, packed as flat rows are. The loss is the same in both: it reads the rows as they
were recorded, and takes each token's log-probability from the one path in which it is trained.

Legend: B rows of a micro-batch, T padded width, N packed tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.attention import Rows, rows_of
from replay_lib.engine.early import no_trees
from replay_lib.engine.tree_attention import Piece, pieces_of
from replay_lib.merged import PrefixTree, differing_routes, merged_routes, training_paths
from replay_lib.routing import placeholder
from replay_lib.tree_check import checked_tree

PADDING = -1
#: How merged rows can be packed.
ROWS = ("merged", "unmerged")


@dataclass(frozen=True, kw_only=True)
class TreeRow:
    """One row of a batch with merged rows; a flat one has no tree and one path.

    ``path_routes`` are int16 ``[n, L, K]`` of the MoE layers, one a path (empty: no routes).
    """

    tree: PrefixTree | None
    path_routes: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the tokens of a micro-batch stand among N packed ones.

    ``origin [N]`` is the place ``row * T + token`` of each in the micro-batch, or PADDING;
    ``place [B * T]`` is the packed position from which each real token's log-probability is taken
    (0 elsewhere); ``experts [N, L, K]`` are the saved ones, the placeholder on padding.
    """

    origin: Tensor
    place: Tensor
    layout: Rows
    experts: Tensor | None


def check_rows_option(wanted: str, batches: Sequence[RankBatch], where: Path) -> None:
    """Raise UsageError where a packing of trees is asked for and no row is one."""
    if wanted != "recorded" and all(batch.merge_info is None for batch in batches):
        raise no_trees(where, wanted)


def tree_rows_of(batch: RankBatch, *, routes: bool) -> tuple[TreeRow, ...]:
    """Checked rows of a batch with merged ones; ``routes`` says whether they are replayed."""
    rows: list[TreeRow] = []
    for row, (merged, length) in enumerate(
        zip(batch.merge_info or (), batch.lengths(), strict=True)
    ):
        where = f"batch of dp rank {batch.dp_rank}: row {row}"
        if merged is None:
            own = batch.routes[row] if batch.routes else None
            rows.append(TreeRow(tree=None, path_routes=() if own is None else (own,)))
        else:
            wants = routes and bool(merged.path_routes)
            tree = checked_tree(merged, length=length, width=batch.width, where=where, routes=wants)
            rows.append(TreeRow(tree=tree, path_routes=merged.path_routes))
    return tuple(rows)


def row_routes(row: TreeRow) -> Tensor:
    """Routes of the row as the trainer composes them, ``[n - 1, L, K]``."""
    return merged_routes(row.tree, row.path_routes) if row.tree else row.path_routes[0]


def several_paths(rows: Sequence[TreeRow]) -> int:
    """How many rows have more than one path."""
    return sum(row.tree is not None and len(row.tree.lengths) > 1 for row in rows)


def routes_apart(rows: Sequence[TreeRow]) -> int:
    """(path, token) pairs whose own route is not the merged row's: there the two replays differ."""
    return sum(differing_routes(r.tree, r.path_routes) for r in rows if r.tree and r.path_routes)


def pack_merged(
    batch: RankBatch, rows: Sequence[int], trees: Sequence[TreeRow], device: torch.device
) -> Packing:
    """Rows ``rows`` of ``batch`` as trees; ``trees`` are those of the whole batch."""
    pieces: list[Piece] = []
    origin: list[Tensor] = []
    places: list[Tensor] = []
    positions: list[Tensor] = []
    experts: list[Tensor] = []
    starts = [0]
    for number, (row, length) in enumerate(zip(rows, _lengths(batch, rows), strict=True)):
        tree = trees[row].tree
        total = tree.total if tree else length
        if tree:
            pieces += pieces_of(tree.ranges, starts[-1])
        else:
            pieces.append(Piece(starts[-1], starts[-1] + total))
        positions.append(tree.positions() if tree else torch.arange(total))
        token = torch.arange(total)
        origin.append(torch.where(token < length, number * batch.width + token, PADDING))
        column = torch.arange(batch.width)
        places.append(torch.where(column < length, starts[-1] + column, 0))
        if trees[row].path_routes:
            experts.append(_filled(row_routes(trees[row]), length, total))
        starts.append(starts[-1] + total)
    layout = Rows(
        starts=tuple(starts),
        positions=torch.cat(positions).to(device),
        even=False,
        pieces=tuple(pieces),
    )
    return Packing(
        origin=torch.cat(origin),
        place=torch.cat(places),
        layout=layout,
        experts=torch.cat(experts) if experts else None,
    )


def pack_paths(
    batch: RankBatch,
    rows: Sequence[int],
    trees: Sequence[TreeRow],
    device: torch.device,
    *,
    align: int,
) -> Packing:
    """Every path of rows ``rows`` as a flat row of its own; the last one has the tail."""
    origin: list[Tensor] = []
    places: list[Tensor] = []
    experts: list[Tensor] = []
    starts = [0]
    for number, (row, length) in enumerate(zip(rows, _lengths(batch, rows), strict=True)):
        tree = trees[row].tree
        paths = [tree.path(p) for p in range(len(tree.lengths))] if tree else []
        paths = paths or [torch.arange(length)]
        trained = torch.zeros(length, dtype=torch.int64)
        if tree:
            trained = training_paths(tree, batch.input_ids[row], batch.labels[row])
        place = torch.zeros(batch.width, dtype=torch.int64)
        for path, tokens in enumerate(paths):
            mine = trained[tokens] == path
            place[tokens[mine]] = starts[-1] + mine.nonzero().flatten()
            origin.append(number * batch.width + tokens)
            if trees[row].path_routes:
                experts.append(_filled(trees[row].path_routes[path], len(tokens), len(tokens)))
            starts.append(starts[-1] + len(tokens))
        places.append(place)
    tail = -starts[-1] % align
    starts[-1] += tail
    origin.append(torch.full((tail,), PADDING))
    if experts:
        experts.append(_filled(experts[0][:0], 0, tail))
    return Packing(
        origin=torch.cat(origin),
        place=torch.cat(places),
        layout=rows_of(starts, device),
        experts=torch.cat(experts) if experts else None,
    )


def lengthened(packing: Packing, multiple: int) -> Packing:
    """``packing`` with padding behind it, as a row of its own, up to a multiple of ``multiple``."""
    layout, experts = packing.layout, packing.experts
    total = layout.starts[-1]
    tail = -total % multiple
    if not tail:
        return packing
    more = torch.arange(tail, device=layout.positions.device)
    return Packing(
        origin=torch.cat([packing.origin, torch.full((tail,), PADDING)]),
        place=packing.place,
        layout=dataclasses.replace(
            layout,
            starts=(*layout.starts, total + tail),
            positions=torch.cat([layout.positions, more]),
            pieces=(*layout.pieces, Piece(total, total + tail)),
        ),
        experts=None if experts is None else torch.cat([experts, _filled(experts[:0], 0, tail)]),
    )


def _lengths(batch: RankBatch, rows: Sequence[int]) -> list[int]:
    lengths = batch.lengths()
    return [lengths[row] for row in rows]


def _filled(route_TLK: Tensor, real: int, total: int) -> Tensor:
    """``[total, L, K]``: the routes of ``real`` tokens, the last one and padding without any."""
    layers, topk = (int(d) for d in route_TLK.shape[1:])
    filled = placeholder(layers, topk, route_TLK.dtype).repeat(total, 1, 1)
    used = max(real - 1, 0)
    filled[:used] = route_TLK[:used]
    return filled
