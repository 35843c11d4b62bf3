"""One rank's routes, before a model is there: everything that is wrong, not the first of it.

Legend: n real tokens of a row, L layers of the payload, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replay_lib.analysis.columns import numbers
from replay_lib.analysis.findings import Finding, Place, finding
from replay_lib.batch import RankBatch
from replay_lib.engine.model_config import moe_pattern
from replay_lib.merged import MergedRow
from replay_lib.routing import compose_padding

#: Tokens in a row with the same experts in every layer; by chance it is (1/C(E,K))**(L*(n-1)).
LONGEST_RUN = 8


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """What the routes must fit: which layers are MoE, top-k and number of experts."""

    moe: tuple[bool, ...]
    topk: int
    experts: int

    @property
    def moe_layers(self) -> list[int]:
        """Transformer layers that are MoE."""
        return [layer for layer, is_moe in enumerate(self.moe) if is_moe]


def router_shape(fields: Mapping[str, Any]) -> RouterShape | None:
    """From the saved model section; None for a dense model or a section that does not say."""
    layers, experts = fields.get("num_layers"), fields.get("num_moe_experts")
    if not isinstance(layers, int) or not isinstance(experts, int) or not experts:
        return None
    pattern = moe_pattern(fields.get("moe_layer_freq", 1), layers)
    topk = fields.get("moe_router_topk", 2)
    return RouterShape(moe=pattern, topk=int(topk), experts=experts)


def check_rank_routes(
    batch: RankBatch, file: Path, shape: RouterShape, *, replayed: bool
) -> Iterator[Finding]:
    """Findings about the routes of ``batch``; ``replayed``: the run forced them."""
    at = Place(dp_rank=batch.dp_rank)
    paths = _paths(batch)
    bare = [row for row, found in enumerate(paths) if not found]
    if len(bare) == batch.rows:
        if replayed:
            found = "enable_routing_replay is on and no row has routes"
            yield finding("route-switch", file, found, at)
        return
    if not replayed:
        yield finding("route-switch", file, "enable_routing_replay is off and rows have routes", at)
    if bare:
        yield finding("route-missing", file, f"no routes for rows {numbers(bare)}", at)
    every = [
        (row, compose_padding([route], batch.index[row : row + 1])[0])
        for row, found in enumerate(paths)
        for route in found
    ]
    yield from _counts(batch, file)
    yield from _dtypes(every, file, shape, at)
    fitting = yield from _shapes(every, file, shape, at)
    yield from _ids(fitting, file, shape, batch)
    yield from _constant(fitting, file, shape, batch)


_Rows = Sequence[tuple[int, Tensor]]


def _paths(batch: RankBatch) -> list[tuple[Tensor, ...]]:
    """Routes of each row by path; one for a flat row, none where it has none."""
    merged = batch.merge_info or (None,) * batch.rows
    routes = batch.routes or (None,) * batch.rows
    found: list[tuple[Tensor, ...]] = []
    for route, tree in zip(routes, merged, strict=True):
        if isinstance(tree, MergedRow):
            found.append(tree.path_routes)
        else:
            found.append(() if route is None else (route,))
    return found


def _counts(batch: RankBatch, file: Path) -> Iterator[Finding]:
    unused: list[int] = []
    for row, (route, length) in enumerate(zip(batch.routes, batch.lengths(), strict=True)):
        if route is None or len(route) == max(length - 1, 0):
            continue
        if len(route) == length:
            unused.append(row)
            continue
        found = f"{len(route)} routes for {length} tokens, not {length - 1}"
        yield finding("route-count", file, found, Place(dp_rank=batch.dp_rank, row=row))
    if unused:
        found = f"n routes for n tokens in rows {numbers(unused)}"
        yield finding("route-unused", file, found, Place(dp_rank=batch.dp_rank))


def _dtypes(rows: _Rows, file: Path, shape: RouterShape, at: Place) -> Iterator[Finding]:
    for dtype in dict.fromkeys(route.dtype for _row, route in rows):
        largest = torch.iinfo(dtype).max
        if largest < shape.experts - 1:
            name = str(dtype).removeprefix("torch.")
            found = f"{name} holds ids up to {largest}, the model has {shape.experts} experts"
            yield finding("route-dtype-narrow", file, found, at)


def _shapes(
    rows: _Rows, file: Path, shape: RouterShape, at: Place
) -> Generator[Finding, None, _Rows]:
    """Yields findings and returns the rows whose layers and top-k fit."""
    allowed = {len(shape.moe), len(shape.moe_layers)}
    for _row, route in rows[:1]:  # a payload is of one shape: the reader sees to it
        layers, topk = (int(n) for n in route.shape[1:])
        if layers not in allowed:
            expected = " or ".join(map(str, sorted(allowed, reverse=True)))
            yield finding("route-layers", file, f"{layers} layers, not {expected}", at)
            return ()
        if topk != shape.topk:
            yield finding("route-topk", file, f"top-{topk}, the model has top-{shape.topk}", at)
            return ()
    return rows


def _seen(route: Tensor, shape: RouterShape, used: int) -> tuple[Tensor, list[int]]:
    """Ids ``[tokens, MoE layers, K]`` that a replay reads, and the layers by the model's count."""
    return seen_layers(route[:used].long(), shape), shape.moe_layers


def seen_layers(routes: Tensor, shape: RouterShape) -> Tensor:
    """The MoE layers of ``routes [..., L, K]``; a payload of all layers has dummies in others."""
    return routes[..., shape.moe_layers, :] if routes.shape[-2] == len(shape.moe) else routes


def _used(batch: RankBatch, row: int, route: Tensor) -> int:
    merged = batch.merge_info is not None and batch.merge_info[row] is not None
    return len(route) if merged else min(len(route), max(batch.lengths()[row] - 1, 0))


def _ids(rows: _Rows, file: Path, shape: RouterShape, batch: RankBatch) -> Iterator[Finding]:
    told: dict[str, tuple[Place, str, int, int]] = {}
    for row, route in rows:
        ids_TLK, layers = _seen(route, shape, _used(batch, row, route))
        outside_TL = ((ids_TLK < 0) | (ids_TLK >= shape.experts)).any(dim=-1)
        twice_TL = (ids_TLK.sort(dim=-1).values.diff(dim=-1) == 0).any(dim=-1)
        for code, bad_TL in (
            ("route-expert-outside", outside_TL),
            ("route-duplicate-expert", twice_TL),
        ):
            if not bool(bad_TL.any()):
                continue
            token, at = (int(i) for i in bad_TL.nonzero()[0])
            place = Place(dp_rank=batch.dp_rank, row=row, token=token, layer=layers[at])
            here = place, str(ids_TLK[token, at].tolist()), 0, 0
            first, ids, count, rows_so_far = told.get(code, here)
            told[code] = first, ids, count + int(bad_TL.sum()), rows_so_far + 1
    for code, (place, ids, count, many) in told.items():
        found = f"experts {ids} of {shape.experts} ({count} such places in {many} rows)"
        yield finding(code, file, found, place)


def _constant(rows: _Rows, file: Path, shape: RouterShape, batch: RankBatch) -> Iterator[Finding]:
    """The longest run of equal routes, where it is too long for chance; padding rows have one."""
    if shape.topk >= shape.experts:
        return  # every token has all experts
    worst: tuple[int, Place, str] | None = None
    count = 0
    for row, route in rows:
        if int(batch.index[row]) < 0:
            continue
        ids_TLK, _layers = _seen(route, shape, _used(batch, row, route))
        start, length = _longest_run(ids_TLK.flatten(1))
        if length < LONGEST_RUN:
            continue
        count += 1
        if worst is None or length > worst[0]:
            place = Place(dp_rank=batch.dp_rank, row=row, token=start)
            worst = length, place, str(ids_TLK[start, 0].tolist())
    if worst is not None:
        length, place, ids = worst
        found = f"{length} tokens in a row with the experts {ids} of layer {shape.moe_layers[0]}"
        yield finding("route-constant", file, f"{found} ({count} rows with such a run)", place)


def _longest_run(ids_TN: Tensor) -> tuple[int, int]:
    """Start and length of the longest run of equal rows; (0, 0) without rows."""
    if not len(ids_TN):
        return 0, 0
    new_T = torch.ones(len(ids_TN), dtype=torch.bool)
    new_T[1:] = (ids_TN[1:] != ids_TN[:-1]).any(dim=1)
    starts = new_T.nonzero().flatten()
    lengths = torch.diff(starts, append=torch.tensor([len(ids_TN)]))
    longest = int(lengths.argmax())
    return int(starts[longest]), int(lengths[longest])
