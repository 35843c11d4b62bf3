"""Log-probabilities and entropies where the vocabulary is split over tensor-parallel ranks.

The same values as :func:`replay_lib.loss.logits.log_prob_and_entropy` gives on one rank. Megatron's
vocabulary-parallel cross entropy is not used: it changes its saved tensor in place, and here one
forward has several backwards. Every rank of the axis gets all values, and each backpropagates the
whole gradient into its own part of the logits.

Legend: N packed tokens, V vocabulary, R ranks; a rank has V / R columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from replay_lib.engine.groups import Axis
from replay_lib.loss import GrpoSettings


def split_log_prob_and_entropy(
    logits: Tensor, labels: Tensor, settings: GrpoSettings, axis: Axis
) -> tuple[Tensor, Tensor]:
    """``(log_prob [N], entropy [N])`` in nats, float32, from this rank's ``logits [N, V / R]``."""
    logits = logits.float()
    shifted, log_sum = _normalised(logits, axis)
    log_prob = _pick(logits, shifted, labels, axis) - log_sum
    if not settings.wants_entropy:
        return log_prob, torch.zeros_like(log_prob, requires_grad=False)
    top_k = settings.entropy_control.top_k
    if top_k > 0:
        shifted, log_sum = _normalised(_top_k_logits(logits, top_k, axis), axis)
    log_p = shifted - shared(log_sum, axis).unsqueeze(-1)
    p = log_p.exp()
    # where p is 0 the gradient is 0 too, as in entropy_of
    terms = p * torch.where(p > 0, log_p, torch.zeros_like(log_p))
    return log_prob, -total(terms.sum(dim=-1), axis)


def _normalised(logits: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Logits minus the row's largest of all ranks, and the log of the sum of their exponentials."""
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
    shifted = logits - largest.unsqueeze(-1)
    return shifted, total(shifted.exp().sum(dim=-1), axis).log()


def _pick(logits: Tensor, shifted: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """The label's shifted logit; of a label outside the vocabulary 0 without a gradient.

    0 is the shifted logit of the likeliest token: what Megatron's cross entropy leaves there.
    """
    width = logits.shape[-1]
    place = labels - axis.rank * width
    mine = (place >= 0) & (place < width)
    picked = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    return total(torch.where(mine, picked, torch.zeros_like(picked)), axis)


def _top_k_logits(logits: Tensor, top_k: int, axis: Axis) -> Tensor:
    """All but the ``top_k`` largest logits of all ranks at the dtype's least value."""
    width = logits.shape[-1]
    own = logits.detach().topk(min(top_k, width), dim=-1)
    parts = [torch.empty_like(own.values) for _ in range(axis.size)]
    dist.all_gather(parts, own.values.contiguous(), group=axis.group)
    best = torch.cat(parts, dim=-1).topk(min(top_k, width * axis.size), dim=-1).indices
    place = best - axis.rank * own.values.shape[-1]
    mine = (place >= 0) & (place < own.values.shape[-1])
    index = own.indices.gather(-1, place.clamp(0, own.values.shape[-1] - 1))
    # one column more, for what other ranks keep
    dropped = torch.ones(*logits.shape[:-1], width + 1, dtype=torch.bool, device=logits.device)
    dropped.scatter_(-1, torch.where(mine, index, width), False)
    return logits.masked_fill(dropped[..., :width], torch.finfo(logits.dtype).min)


def total(value: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks; the gradient of each rank's value is that of the sum."""
    return torch.as_tensor(_Total.apply(value, axis.group))


def shared(value: Tensor, axis: Axis) -> Tensor:
    """A value that is the same on all ranks, about to meet each rank's own columns."""
    return torch.as_tensor(_Shared.apply(value, axis.group))


class _Total(torch.autograd.Function):
    """What follows is the same on every rank, so each has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        summed = value.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Shared(torch.autograd.Function):
    """Each rank finds the gradient from its own columns; together they are the whole."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
