"""Bring tokens to experts on other ranks and back: expert parallelism.

Each rank sends every token's copies, sorted by expert, to the rank that has the expert, and gets
the results back at the same places. What a rank receives is sorted by expert, then by sending
rank, then as sent; sums run over K in a fixed order. So results repeat bit for bit. Counts are
copied to the host once a layer, since a receiver must know how much to expect.

Legend: N tokens of this rank, H hidden, E experts of all ranks, R ranks, K top-k, M = N * K copies
sent, P copies received.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from replay_lib.engine.dispatch import Combine, Expand, LocalDispatcher
from replay_lib.engine.groups import Axis

Plan = tuple[list[int], list[int]]  # rows sent to and received from each rank


class RankDispatcher(LocalDispatcher):
    """Megatron's dispatcher interface over the ranks of ``axis``, each with E / R experts.

    Expert e is on rank ``e // (E / R)``, as Megatron has it.
    """

    def __init__(self, topk: int, axis: Axis, experts: int) -> None:
        super().__init__(topk)
        self.axis = axis
        self.here = experts // axis.size
        self.sent: list[int] = []
        self.received: list[int] = []
        self.arranged = self.restored = torch.empty(0)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send copies ``[M, H]`` and their probabilities ``[M, 1]``; ``[P, H]``, ``[P, 1]``."""
        self._count()
        weights = probs.gather(1, self.chosen).reshape(-1, 1)
        weights = torch.as_tensor(Expand.apply(weights, self.order, self.inverse, 1))
        copies = torch.as_tensor(Expand.apply(tokens, self.order, self.inverse, self.topk))
        # both in one node of the graph: every rank's backward exchanges them in the same order
        got = Exchange.apply(copies, weights, (self.sent, self.received), self.axis.group)
        return got[0], got[1]

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``([P, H], counts [E / R], [P])``: what was received, sorted by expert."""
        tokens = torch.as_tensor(Arrange.apply(tokens, self.arranged, self.restored))
        probs = torch.as_tensor(Arrange.apply(probs, self.arranged, self.restored))
        return tokens, self.counts, probs.squeeze(1)

    def combine_preprocess(self, tokens: Tensor) -> Tensor:
        """Back in the order in which they were received."""
        return torch.as_tensor(Arrange.apply(tokens, self.restored, self.arranged))

    def token_combine(self, tokens: Tensor) -> Tensor:
        """Send results back and sum them over K: ``[N, H]``."""
        (back,) = Exchange.apply(tokens, None, (self.received, self.sent), self.axis.group)
        return torch.as_tensor(Combine.apply(back, self.order, self.inverse, self.topk))

    def _count(self) -> None:
        """Tell every rank how many copies each of its experts will get; plan the two sorts."""
        device = self.counts.device
        theirs = torch.empty_like(self.counts)  # [R * E / R], by sending rank and expert of ours
        dist.all_to_all_single(theirs, self.counts, group=self.axis.group)
        table = theirs.view(self.axis.size, self.here)
        plan = torch.stack([self.counts.view(self.axis.size, self.here).sum(1), table.sum(1)])
        # plain lists: gloo takes nothing else
        self.sent, self.received = plan.tolist()
        expert = torch.arange(self.here, device=device).repeat(self.axis.size)
        self.arranged = expert.repeat_interleave(theirs).argsort(stable=True)
        self.restored = self.arranged.argsort()
        self.counts = table.sum(0)


class Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradient goes the other way round. The second tensor is optional."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, plan: Plan, group: Any
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group = plan, group
        return tuple(_exchange(v, plan, group) for v in (x, y) if v is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = [_exchange(g, ctx.plan[::-1], ctx.group) for g in grads]
        return back[0], back[1] if len(back) > 1 else None, None, None


def _exchange(x: Tensor, plan: Plan, group: Any) -> Tensor:
    send, receive = plan
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class Arrange(torch.autograd.Function):
    """Rows in another order; the gradient is gathered back (never scattered, never added up)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None
