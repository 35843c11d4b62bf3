"""From logits to what the loss reads: the log-probability of each label and the entropy.

Source: AXRL ``GrpoTrainer.logits_processor`` on one rank, with Megatron-Core's vocabulary-parallel
cross entropy. No temperature is applied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replay_lib.loss.settings import GrpoSettings


def log_prob_and_entropy(
    logits: Tensor, labels: Tensor, settings: GrpoSettings, want_entropy: bool | None = None
) -> tuple[Tensor, Tensor]:
    """``(log_prob [N], entropy [N])`` in nats from ``logits [N, V]`` and ``labels [N]`` (int64).

    Computed in float32, in float64 where the logits are. ``want_entropy`` None means: where
    ``settings`` ask for it; unwanted entropies are zeros that carry no gradient.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(logits, dim=-1)
    log_prob = _pick(log_p, logits, labels)
    if not (settings.wants_entropy if want_entropy is None else want_entropy):
        return log_prob, torch.zeros_like(log_prob, requires_grad=False)
    top_k = settings.entropy_control.top_k
    if top_k > 0:
        log_p = torch.log_softmax(top_k_logits(logits, top_k), dim=-1)
    return log_prob, entropy_of(log_p)


def entropy_of(log_p: Tensor) -> Tensor:
    """``-sum p log p`` over the last dimension, from log-probabilities; 0 log 0 is 0.

    Where p is 0 the gradient is 0 too: a logit that was masked away has a log-probability near
    the dtype's least value, and its product with a gradient above 1 would overflow.
    """
    p = log_p.exp()
    return -(p * torch.where(p > 0, log_p, torch.zeros_like(log_p))).sum(dim=-1)


def top_k_logits(logits: Tensor, top_k: int) -> Tensor:
    """All but the ``top_k`` largest logits of the last dimension at the dtype's least value.

    With k at or above V nothing changes; which of several equal logits stay is torch's choice.
    Source: AXRL ``tensor_parallel.vocab_parallel_top_k_mask``.
    """
    kept = logits.detach().topk(min(top_k, logits.shape[-1]), dim=-1, sorted=False).indices
    dropped = torch.ones_like(logits, dtype=torch.bool).scatter(-1, kept, False)
    return logits.masked_fill(dropped, torch.finfo(logits.dtype).min)


def _pick(log_p: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label; of a label outside the vocabulary what Megatron gives.

    That is ``-(logsumexp - max)`` for labels such as -100: the value of the likeliest token, with
    the gradient of ``-logsumexp`` alone. Such positions never train, but the value is in the saved
    columns, so it has to come out again.
    """
    outside = (labels < 0) | (labels >= logits.shape[-1])
    index = torch.where(outside, logits.detach().argmax(dim=-1), labels).unsqueeze(-1)
    picked = log_p.gather(-1, index).squeeze(-1)
    logit = logits.gather(-1, index).squeeze(-1)
    # zero in value; takes the picked logit's own gradient away again
    return picked - torch.where(outside, logit - logit.detach(), torch.zeros_like(logit))
