"""Probability ratios between two policies, of tokens and of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

#: Log-ratios are clamped to this many nats on either side before ``exp``.
LOG_RATIO_BOUND = 20.0


def token_ratio(log_prob_BT: Tensor, base_BT: Tensor) -> Tensor:
    """``exp(clamp(log_prob - base, -20, 20))``, ``[B, T]``.

    The clamp passes a gradient inside and at its bounds and none outside, so a token that is 30
    nats away from its base has no gradient at all. Source: AXRL ``GrpoTrainer.get_ratio``.
    """
    return torch.exp(_bounded(log_prob_BT - base_BT))


def sequence_ratio(log_prob_BT: Tensor, base_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Geometric mean of the token ratios of each row over its loss tokens, ``[B, 1]``.

    Tokens and the mean are clamped to +-20 nats; a row without loss tokens has ratio 1.
    Source: AXRL ``GrpoTrainer.get_seq_ratio`` (https://richardli.xyz/rl-collapse).
    """
    log_ratio_BT = _bounded((log_prob_BT - base_BT) * loss_mask_BT)
    length_B = loss_mask_BT.sum(dim=-1).clamp(min=1)
    return torch.exp(_bounded(log_ratio_BT.sum(dim=-1) / length_B)).unsqueeze(-1)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
