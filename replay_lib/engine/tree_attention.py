"""Attention over merged rows: each piece of a tree sees its ancestors and itself causally.

A piece is a run of queries with the ranges of keys that all of them see; behind those a query
sees its own piece up to itself. Pieces are taken one after another, forward and backward, so that
the keys of one path, not those of all paths, are held at a time.

Legend: N packed tokens, A query heads, G key/value groups, D head width, Q queries of a piece,
P keys before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_lib.engine.sdpa import causal_sdpa
from replay_lib.merged import Range

#: The most elements of a mask: where a device has no kernel for a causal piece behind other keys,
#: torch writes the mask out (16 MB of booleans).
LARGEST_MASK = 1 << 24


@dataclass(frozen=True)
class Piece:
    """Queries ``start`` to ``end`` of the packed tokens; ``before`` are ranges of keys."""

    start: int
    end: int
    before: tuple[tuple[int, int], ...] = ()

    @property
    def reach(self) -> int:
        """Keys that the last query sees: its place in its path, counted from 1."""
        return sum(b - a for a, b in self.before) + self.end - self.start


def pieces_of(ranges: Sequence[Range], offset: int, largest: int = LARGEST_MASK) -> list[Piece]:
    """Pieces of a row that begins at packed token ``offset``, from the ranges of its tree.

    A piece behind others is cut until its mask has at most ``largest`` elements; what was cut off
    in front becomes a range of keys.
    """
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for r in sorted(ranges):
        keys = seen.setdefault((r.query_start + offset, r.query_end + offset), [])
        if not r.causal:
            keys.append((r.key_start + offset, r.key_end + offset))
    found: list[Piece] = []
    for (start, end), before in sorted(seen.items()):
        found += _cut(Piece(start, end, tuple(before)), largest)
    return found


def _cut(piece: Piece, largest: int) -> list[Piece]:
    if not piece.before:
        return [piece]
    size = max(1, largest // piece.reach)
    return [
        Piece(
            start,
            min(start + size, piece.end),
            piece.before + (((piece.start, start),) if start > piece.start else ()),
        )
        for start in range(piece.start, piece.end, size)
    ]


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], scale: float
) -> Tensor:
    """Attend ``query [N, A, D]`` to ``key, value [N, G, D]``; ``[N, A, D]``.

    ``pieces`` hold every packed token once, in order.
    """
    return torch.as_tensor(_TreeAttention.apply(query, key, value, (tuple(pieces), scale)))


_How = tuple[tuple[Piece, ...], float]  # the pieces and the softmax scale


class _TreeAttention(torch.autograd.Function):
    """Forward keeps queries, keys and values alone; backward does each piece's attention again.

    Gradients of keys that several pieces see are added up in float32, in the order of the pieces.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(query, key, value)
        pieces, scale = ctx.how = how
        out = torch.empty_like(query)
        for piece in pieces:
            q, k, v = query[piece.start : piece.end], _keys(key, piece), _keys(value, piece)
            out[piece.start : piece.end] = _attend(q, k, v, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        pieces, scale = ctx.how
        query, key, value = ctx.saved_tensors
        grad_q = torch.empty_like(query)
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value)]
        for piece in pieces:
            own = slice(piece.start, piece.end)
            inputs = (query[own], _keys(key, piece), _keys(value, piece))
            leaves = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                out = _attend(leaves[0], leaves[1], leaves[2], scale)
            grad_q[own], *of_keys = torch.autograd.grad(out, leaves, grads[0][own])
            for total, part in zip(sums, of_keys, strict=True):
                _add_keys(total, part, piece)
        return grad_q, sums[0].to(key.dtype), sums[1].to(value.dtype), None


def _keys(x: Tensor, piece: Piece) -> Tensor:
    """``[P + Q, G, D]``: the rows of ``x`` that a piece sees, its own last."""
    return torch.cat([x[a:b] for a, b in (*piece.before, (piece.start, piece.end))])


def _add_keys(total: Tensor, part: Tensor, piece: Piece) -> None:
    """The way back of :func:`_keys`; ranges of a piece do not overlap."""
    done = 0
    for a, b in (*piece.before, (piece.start, piece.end)):
        total[a:b] += part[done : done + b - a]
        done += b - a


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return causal_sdpa(query[None], key[None], value[None], scale)[0]
