"""Attention where the packed tokens are cut into equal parts: context parallelism.

Part c of R holds packed tokens ``[c * N / R, (c + 1) * N / R)``, wherever rows begin or end. Each
rank attends its own queries to the keys and values of all parts, gathered with their gradients.
Rows that are trees are attended whole on every rank, and each keeps its own part.

Legend: N packed tokens, n = N / R of this rank, A query heads, G key/value groups, D head width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from replay_lib.engine.attention import Rows
from replay_lib.engine.groups import Axis
from replay_lib.engine.sdpa import causal_sdpa
from replay_lib.engine.tree_attention import tree_attention


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> Tensor:
    """Attend ``query [n, A, D]`` to ``key, value [n, G, D]`` of all parts; ``[n, A, D]``."""
    axis = rows.context
    if rows.pieces:
        q, k, v = _Gather.apply(axis, query, key, value)
        whole = tree_attention(q, k, v, rows.pieces, scale)
        return whole.chunk(axis.size)[axis.rank]
    n = query.shape[0]
    first = axis.rank * n
    lengths = [end - begin for begin, end in pairwise(rows.starts)]
    keys, values = (x.split(lengths) for x in _Gather.apply(axis, key, value))
    parts: list[Tensor] = []
    for (begin, end), k, v in zip(pairwise(rows.starts), keys, values, strict=True):
        start, stop = max(begin, first), min(end, first + n)
        if start < stop:  # queries start..stop of this row look at keys begin..stop
            q = query[start - first : stop - first]
            seen = stop - begin
            parts.append(causal_sdpa(q[None], k[None, :seen], v[None, :seen], scale)[0])
    return torch.cat(parts)


class _Gather(torch.autograd.Function):
    """Tensors of all parts; a part's gradient is the sum of what all ranks have for it.

    All in one node of the graph, so that every rank's backward exchanges them in the same order.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(gather_parts(part, axis) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(_own_sum(grad, ctx.axis) for grad in grads))


def _own_sum(grad: Tensor, axis: Axis) -> Tensor:
    summed = grad.contiguous().clone()
    dist.all_reduce(summed, group=axis.group)
    return summed.chunk(axis.size)[axis.rank].contiguous()


def gather_parts(part: Tensor, axis: Axis) -> Tensor:
    """``[n, ...]`` of every rank, one after another: ``[N, ...]``, without a gradient."""
    parts = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(parts, part.contiguous(), group=axis.group)
    return torch.cat(parts)
