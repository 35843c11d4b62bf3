"""Bring tokens to their experts and back, where every expert is on this rank.

Megatron's dispatchers are made for several ranks: they copy counts to the host, once or twice a
layer, and add results up by scattering. With all experts at hand, tokens are expanded K times,
sorted by expert, and gathered back; sums run over K in a fixed order, so the result is the same
bit for bit on every run, and the queue of a GPU is never stopped.

Legend: N tokens, H hidden, E experts, K top-k, M = N * K.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor


class LocalDispatcher(MoETokenDispatcher):
    """Megatron's dispatcher for the case that it has no class for: every expert is here."""

    def __init__(self, topk: int) -> None:
        # The base class only takes note of process groups, and there is nobody to talk to.
        self.topk = topk
        self.shape: torch.Size | None = None
        self.order = self.inverse = self.chosen = self.counts = torch.empty(0)

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Note who goes where; ``routing_map`` is bool ``[N, E]`` with at most K true a row.

        A token that a finite capacity dropped from an expert has probability 0 there: it is sent
        along and adds nothing.
        """
        self.shape = tokens.shape
        self.chosen = routing_map.int().topk(self.topk, dim=1, sorted=False).indices
        flat = self.chosen.flatten()
        self.order = flat.argsort(stable=True)
        self.inverse = self.order.argsort()
        experts = torch.arange(routing_map.shape[1], device=flat.device)
        self.counts = (flat.unsqueeze(1) == experts).sum(dim=0)
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing to send: every expert is here."""
        return tokens, probs

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``([M, H], counts [E], [M])``: tokens and probabilities sorted by expert."""
        weights = probs.gather(1, self.chosen).reshape(-1, 1)
        sorted_weights = Expand.apply(weights, self.order, self.inverse, 1)
        sorted_tokens = Expand.apply(tokens, self.order, self.inverse, self.topk)
        return sorted_tokens, self.counts, sorted_weights.squeeze(1)

    def combine_preprocess(self, tokens: Tensor) -> Tensor:
        """Back in the order of tokens, summed over the K experts of each: ``[N, H]``."""
        return torch.as_tensor(Combine.apply(tokens, self.order, self.inverse, self.topk))

    def token_combine(self, tokens: Tensor) -> Tensor:
        """Nothing to fetch: every expert is here."""
        return tokens

    def combine_postprocess(self, tokens: Tensor) -> Tensor:
        """In the shape that the layer was given."""
        assert self.shape is not None
        return tokens.view(self.shape)


class Expand(torch.autograd.Function):
    """``x [N, H]`` repeated K times and sorted: ``[M, H]``; gradients sum over K."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return x.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grads[0].index_select(0, inverse)
        return back.view(-1, ctx.topk, back.shape[1]).sum(dim=1), None, None, None


class Combine(torch.autograd.Function):
    """The other way round: ``[M, H]`` sorted to sums over K, ``[N, H]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.topk = topk
        back = x.index_select(0, inverse)
        return back.view(-1, topk, x.shape[1]).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order // ctx.topk), None, None, None
