"""Causal attention over packed rows with scaled-dot-product attention.

Rows of a micro-batch lie one after another in one sequence of N tokens. They are gathered into a
padded ``[B, A, S, D]`` block (a causal row never looks at the padding behind it), or, where that
would waste more than half of the work, taken row by row. Merged rows go through tree_attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from replay_lib.engine.groups import ALONE, Axis
from replay_lib.engine.sdpa import causal_sdpa
from replay_lib.engine.tree_attention import Piece, tree_attention


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the rows of a packed micro-batch lie.

    ``starts`` are B + 1 offsets into the N packed tokens, the tail belonging to the last row;
    ``positions [N]`` is each token's place in its row;
    ``even`` says that all rows are equally long. Else ``gather [B * S]`` maps padded to packed
    positions, ``scatter [N]`` packed to padded ones, and ``real [B * S, 1, 1]`` is 1 on positions
    that are not padding; all are None where rows are taken one by one. ``pieces`` are those of
    the trees where rows are merged: then ``positions`` are places in a path, and nothing is padded.
    ``context`` has more than one rank where each has a part of the tokens: ``positions`` are then
    those of this part, and the rest is of all N tokens.
    """

    starts: tuple[int, ...]
    positions: Tensor
    even: bool
    gather: Tensor | None = None
    scatter: Tensor | None = None
    real: Tensor | None = None
    pieces: tuple[Piece, ...] = ()
    context: Axis = ALONE

    @property
    def longest(self) -> int:
        """S, tokens of the longest row (merged: of the longest path), the tail included."""
        if self.pieces:
            return max(piece.reach for piece in self.pieces)
        return max(b - a for a, b in pairwise(self.starts))


def rows_of(starts: list[int], device: torch.device) -> Rows:
    """Index tensors for rows that start at ``starts`` (B + 1 offsets)."""
    lengths = [b - a for a, b in pairwise(starts)]
    longest, rows = max(lengths), len(lengths)
    even = rows * longest == starts[-1]
    first = torch.tensor(starts[:-1]).unsqueeze(1)
    places = torch.cat([torch.arange(n) for n in lengths]).to(device)
    if even or rows * longest > 2 * starts[-1]:
        return Rows(starts=tuple(starts), positions=places, even=even)
    last = torch.tensor(starts[1:]).unsqueeze(1) - 1
    gather = torch.minimum(first + torch.arange(longest), last).reshape(-1)
    scatter = torch.cat([torch.arange(n) + row * longest for row, n in enumerate(lengths)])
    real = torch.zeros(rows * longest, 1, 1).index_fill_(0, scatter, 1.0)
    return Rows(
        starts=tuple(starts),
        positions=places,
        even=False,
        gather=gather.to(device),
        scatter=scatter.to(device),
        real=real.to(device),
    )


def packed_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Tensor:
    """Attend ``query [N, A, D]`` to ``key, value [N, G, D]`` inside each row; ``[N, A, D]``."""
    if rows.pieces:
        return tree_attention(query, key, value, rows.pieces, scale)
    if rows.even:
        q, k, v = (x.view(-1, rows.longest, *x.shape[1:]) for x in (query, key, value))
        return causal_sdpa(q, k, v, scale).flatten(0, 1)
    if rows.gather is None:
        parts = [
            causal_sdpa(query[None, a:b], key[None, a:b], value[None, a:b], scale)[0]
            for a, b in pairwise(rows.starts)
        ]
        return torch.cat(parts)
    q, k, v = (
        _Pad.apply(x, rows).view(-1, rows.longest, *x.shape[1:]) for x in (query, key, value)
    )
    out = causal_sdpa(q, k, v, scale)
    return torch.as_tensor(_Unpad.apply(out.flatten(0, 1), rows))


class _Pad(torch.autograd.Function):
    """Packed to padded. No gradient comes from padding, so the way back is a plain gather.

    (A padded query's output is dropped, and no real query looks at a key behind it. The gradient
    of ``index_select`` would add up instead, which is slow where it has to be deterministic.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        assert rows.gather is not None
        return x.index_select(0, rows.gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.rows.scatter), None


class _Unpad(torch.autograd.Function):
    """Padded to packed; padding gets gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        assert rows.scatter is not None
        return x.index_select(0, rows.scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        back = grads[0].index_select(0, ctx.rows.gather)
        return back * ctx.rows.real.to(back.dtype), None
