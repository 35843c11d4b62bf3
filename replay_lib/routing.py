"""Expert routes of the rollout, checked and laid over the tokens of a batch.

A row of ``n`` real tokens has ``n - 1`` route rows: row ``i`` names the experts used when token
``i`` was processed, to predict token ``i + 1``. The last token has none; it and all padding get
the placeholder experts ``0..K-1``.

Source: AXRL ``router_replay.expand_routed_experts_to_token_positions``; AXRL itself checks the
number of rows only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replay_lib.errors import BatchError, fault


def placeholder(layers: int, topk: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """The experts ``0..K-1`` in every layer, ``[L, K]``."""
    return torch.arange(topk, dtype=dtype).expand(layers, topk)


def compose_padding(routes: Sequence[Tensor], index_B: Tensor) -> list[Tensor]:
    """``routes`` with the placeholder in padding rows (index below 0) that hold zeros alone.

    The trainer gives padding the experts ``0..K-1``; a writer that filled zeros there names one
    expert K times, which no router can be made to do. Rows of real tokens stay as they are.
    """
    return [
        placeholder(int(route.shape[1]), int(route.shape[2]), route.dtype).repeat(len(route), 1, 1)
        if padding and not bool(route.any())
        else route
        for route, padding in zip(routes, (index_B < 0).tolist(), strict=True)
    ]


def expand_routes(routes: Sequence[Tensor], attention_mask_BT: Tensor) -> Tensor:
    """``[B, T, L, K]`` from ``routes[b]`` of ``[n_b - 1, L, K]``, of their dtype, on the CPU.

    A row with ``n_b`` route rows is taken too, its last one is not used. Real tokens are taken to
    start at position 0, as a trainer writes them. Raises BatchError, naming the row, where a row's
    count, its layers or its K do not fit.
    """
    width = int(attention_mask_BT.shape[1])
    lengths = [int(n) for n in attention_mask_BT.sum(dim=1).tolist()]
    if len(routes) != len(lengths) or not routes:
        found, expected = f"routes of {len(routes)} rows", f"one for each of {len(lengths)} rows"
        raise BatchError(fault("routes", None, found, expected))
    layers, topk = (int(d) for d in routes[0].shape[-2:])
    expanded = placeholder(layers, topk, routes[0].dtype).repeat(len(routes), width, 1, 1)
    for row, (route_TLK, length) in enumerate(zip(routes, lengths, strict=True)):
        check_shape(route_TLK, length, layers, topk, f"routes: row {row}")
        used = max(length - 1, 0)
        expanded[row, :used] = route_TLK[:used].to("cpu")
    return expanded


def check_routes(
    routes: Sequence[Tensor | None],
    lengths: Sequence[int],
    *,
    layers: int,
    topk: int,
    experts: int,
    where: str,
    unit: str = "row",
    moe_layers: Sequence[int] | None = None,
) -> None:
    """Raise BatchError at the first route that cannot have been taken, naming row, token, layer.

    ``routes[b]`` is an integer tensor ``[n_b - 1, L, K]`` (or ``n_b`` rows, the last unused),
    ``lengths[b]`` is ``n_b``. Refused: some rows without routes beside rows with them, other
    counts, ids outside ``0..experts - 1``, one expert twice for a token, and a dtype too narrow
    for ``experts`` (its ids may have wrapped). ``unit`` is what errors call one of ``routes``.
    ``moe_layers`` are the layers to look into: dense ones carry dummies; None looks into all.
    """
    missing = [row for row, route_TLK in enumerate(routes) if route_TLK is None]
    if missing and len(missing) < len(routes):
        found = f"no routes for {unit}s {missing} of {len(routes)}"
        raise BatchError(fault(where, "routes", found, f"routes for all {unit}s or for none"))
    if len(routes) != len(lengths):
        found, expected = f"{len(routes)} {unit}s", f"{len(lengths)}, as in the batch"
        raise BatchError(fault(where, "routes", found, expected))
    for row, (route_TLK, length) in enumerate(zip(routes, lengths, strict=True)):
        if route_TLK is not None:
            place = f"{where}: {unit} {row}"
            check_shape(route_TLK, length, layers, topk, place)
            _check_dtype(route_TLK.dtype, experts, place)
            used_TLK = route_TLK[: max(length - 1, 0)].to(torch.int64)
            seen = list(range(layers)) if moe_layers is None else list(moe_layers)
            _check_ids(used_TLK[:, seen], seen, experts, place)


def check_shape(route_TLK: Tensor, length: int, layers: int, topk: int, where: str) -> None:
    """Raise BatchError unless the routes of a row of ``length`` tokens have n - 1 or n rows."""
    expected = max(length - 1, 0)
    shape = tuple(route_TLK.shape)
    if len(shape) != 3 or shape[1:] != (layers, topk) or shape[0] not in (expected, length):
        raise BatchError(
            fault(
                where,
                "routes",
                f"shape {list(shape)}",
                f"[{expected}, {layers}, {topk}] for {length} tokens (or {length} rows)",
                "A rollout engine that cut or shifted the routes cannot be replayed.",
            )
        )


def _check_dtype(dtype: torch.dtype, experts: int, where: str) -> None:
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise BatchError(fault(where, "routes", str(dtype), "integers"))
    largest = torch.iinfo(dtype).max
    if largest < experts - 1:
        found = f"{dtype}, which holds ids up to {largest}"
        raise BatchError(
            fault(where, "routes", found, f"ids up to {experts - 1}", "They may have wrapped.")
        )


def _check_ids(route_TLK: Tensor, layers: Sequence[int], experts: int, where: str) -> None:
    outside_TL = ((route_TLK < 0) | (route_TLK >= experts)).any(dim=-1)
    _refuse(outside_TL, route_TLK, layers, where, f"ids from 0 to {experts - 1}")
    twice_TL = (route_TLK.sort(dim=-1).values.diff(dim=-1) == 0).any(dim=-1)
    _refuse(twice_TL, route_TLK, layers, where, "different experts")


def _refuse(
    bad_TL: Tensor, route_TLK: Tensor, layers: Sequence[int], where: str, expected: str
) -> None:
    if bool(bad_TL.any()):
        token, at = (int(i) for i in bad_TL.nonzero()[0])
        field = f"token {token}, layer {layers[at]}"
        found = f"experts {route_TLK[token, at].tolist()}"
        then = f"{int(bad_TL.sum())} such places in this row."
        raise BatchError(fault(where, field, found, expected, then))
