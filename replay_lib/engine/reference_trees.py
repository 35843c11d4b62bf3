"""Merged rows of the oracle: taken apart into one padded row a path, by the tree's nodes alone.

Shares nothing with the engine's packing of trees: it reads the tree as it stands in the batch, and
of the attention's ranges it knows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.errors import BatchError, fault
from replay_lib.merged import MergedRow

#: What a token column holds where a path does not train, and behind its end.
_NOTHING = {"labels": -100, "turn_index": -1}


@dataclass(frozen=True)
class Unmerged:
    """``batch`` has a row for each path: row p is recorded row ``rows[p]`` at ``places[p]``.

    Token t of recorded row b is token ``position_BT[b, t]`` of row ``path_BT[b, t]`` there: in the
    path that trains it. Both are int64 ``[B, T]``.
    """

    batch: RankBatch
    rows: list[int]
    places: list[list[int]]
    path_BT: Tensor
    position_BT: Tensor

    def spread(self, values_BT: Tensor, nothing: Any = 0) -> Tensor:
        """``[B, T, ...]`` of recorded rows laid over the paths, ``nothing`` behind their ends."""
        shape = (len(self.rows), max(map(len, self.places)), *values_BT.shape[2:])
        out = values_BT.new_full(shape, nothing)
        for number, (row, place) in enumerate(zip(self.rows, self.places, strict=True)):
            out[number, : len(place)] = values_BT[row, place]
        return out

    def gather(self, values_PT: Tensor) -> Tensor:
        """The way back: each recorded token's value from the path that trains it, ``[B, T]``."""
        return values_PT[self.path_BT, self.position_BT]


def unmerged_batch(batch: RankBatch) -> Unmerged:
    """One row a path, each trainable token in one of them; flat rows stay as they are.

    Columns follow their tokens; ``loss_mask`` is true, and ``labels`` and ``advantage`` are set,
    in the path alone that trains the token. Row columns are repeated. Raises BatchError where a
    row has several paths and no tree.
    """
    path_BT = torch.zeros(batch.rows, batch.width, dtype=torch.int64)
    position_BT = torch.zeros_like(path_BT)
    rows: list[int] = []
    places: list[list[int]] = []
    routes: list[Tensor | None] = []
    for row, length in enumerate(batch.lengths()):
        merged = batch.merge_info[row] if batch.merge_info else None
        paths = _paths(merged, row) if merged else [list(range(length))]
        for path, token in reversed(_order(merged, paths)):  # the first one has the last word
            path_BT[row, paths[path][token]] = len(rows) + path
            position_BT[row, paths[path][token]] = token
        rows += [row] * len(paths)
        places += paths
        routes += _routes_of(batch, row, merged, len(paths))
    bare = batch.replace(merge_info=None, routes=tuple(routes), position_ids=None)
    apart = Unmerged(bare, rows, places, path_BT, position_BT)
    return replace(apart, batch=bare.replace(**_columns(apart)))


def _paths(merged: MergedRow, row: int) -> list[list[int]]:
    """Places of each path's tokens in the merged row."""
    if merged.tree is None:
        found = "several paths and no tree"
        raise BatchError(fault(f"row {row}", "merge_info", found, "a tree of the paths"))
    nodes: list[dict[str, int]] = merged.tree["nodes"]
    found_paths: list[list[int]] = []
    for (leaf, _prefix), length in zip(
        merged.tree["path_to_leaf"], merged.tree["turn_sample_lens"], strict=True
    ):
        tokens: list[int] = []
        number = leaf
        while number >= 0:
            tokens = list(range(nodes[number]["start"], nodes[number]["end"])) + tokens
            number = nodes[number]["parent"]
        found_paths.append(tokens[:length])
    return found_paths


def _order(merged: MergedRow | None, paths: list[list[int]]) -> list[tuple[int, int]]:
    """(path, token) of every token of every path; of those at one place the first one trains it.

    The path that the trainer names as a token's source comes first, then those that go on.
    """
    tree: dict[str, Any] = (merged.tree if merged else None) or {}
    source = tree.get("routing_source_path")
    named = {} if source is None else {n + 1: path for n, path in enumerate(source.tolist())}

    def rank(one: tuple[int, int]) -> tuple[bool, bool, int]:
        path, token = one
        is_source = named.get(paths[path][token], path) == path
        return not is_source, token + 1 == len(paths[path]), path

    return sorted(((p, t) for p, path in enumerate(paths) for t in range(len(path))), key=rank)


def _routes_of(
    batch: RankBatch, row: int, merged: MergedRow | None, paths: int
) -> list[Tensor | None]:
    if merged is None:
        return [batch.routes[row] if batch.routes else None]
    return list(merged.path_routes) or [None] * paths


def _columns(apart: Unmerged) -> dict[str, Any]:
    """Columns of the paths; what trains is there in one path alone."""
    found: dict[str, Any] = {}
    for name in ROW_COLUMNS:
        value = getattr(apart.batch, name)
        found[name] = None if value is None else value[apart.rows]
    for name in TOKEN_COLUMNS:
        value = getattr(apart.batch, name)
        found[name] = None if value is None else apart.spread(value, _NOTHING.get(name, 0))
    trained = torch.zeros_like(found["loss_mask"])
    for number, (row, place) in enumerate(zip(apart.rows, apart.places, strict=True)):
        trained[number, : len(place)] = apart.path_BT[row, place] == number
    for name in ("loss_mask", "labels", "advantage", "turn_index"):
        if found[name] is not None:
            found[name][~trained] = _NOTHING.get(name, 0)
    return found
