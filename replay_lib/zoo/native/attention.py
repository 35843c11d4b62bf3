"""The attention kernel of recorded steps: each row by itself, in the softmax of float32.

Stands for Transformer Engine's. With context parallelism keys and values of all ranks are brought
together and each rank attends from its own queries, which is what Transformer Engine's exchange of
keys and values comes to.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from replay_lib.zoo.native.packing import Places


class RowAttention(MegatronModule):
    """Megatron's core-attention interface over the rows that ``packed_seq_params`` describes."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_megatron: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or config.softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **_megatron: Any,
    ) -> Tensor:
        """``query [n, A, D]`` of this rank to ``key, value [n, G, D]``; ``[n, A * D]``."""
        where: Places = packed_seq_params.places
        if where.all.shape[0] > 1:
            key, value = (_Whole.apply(x, where, packed_seq_params.ranks) for x in (key, value))
        repeat = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
        mine = where.mine.to(query.device)
        parts, order = [], []
        for first, last in pairwise(where.starts):
            here = ((mine >= first) & (mine < last)).nonzero().flatten()
            seen = torch.arange(first, last, device=mine.device) <= mine[here].unsqueeze(1)
            parts.append(self._row(query[here], key[first:last], value[first:last], seen))
            order.append(here)
        out = torch.cat(parts)[torch.cat(order).argsort()]
        return out.reshape(out.shape[0], -1)

    def _row(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("qad,kad->aqk", query.float(), key.float()) * self.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("aqk,kad->qad", weights.to(value.dtype), value)


class _Whole(torch.autograd.Function):
    """This rank's ``[n, ...]`` to the packed ``[N, ...]`` of all; gradients of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, where: Places, group: Any) -> Tensor:
        ctx.where, ctx.group = where, group
        parts = [torch.empty_like(own) for _ in range(where.all.shape[0])]
        dist.all_gather(parts, own.contiguous(), group=group)
        whole = own.new_empty(where.starts[-1], *own.shape[1:])
        whole[where.all.flatten().to(own.device)] = torch.cat(parts)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.where.mine.to(total.device)], None, None
