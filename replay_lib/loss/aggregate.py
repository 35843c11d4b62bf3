"""From token values to one number: AXRL's eight aggregations.

Masking is by multiplication, so a NaN or an infinity at a masked position poisons a mean: that
is what the trainer does, and a replay has to do it too. ``token-max`` and ``token-min`` mask by
filling, the quantiles by selection; quantiles are taken in float32 whatever the dtype.

Source: AXRL ``BaseTrainer.aggregate_with_mask``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replay_lib.loss.settings import ValueAggType

#: Added to counts and variances. In float32 a count of 1 or more is unchanged by it.
EPSILON = 1e-10


def aggregate(value_BT: Tensor, mask_BT: Tensor, mode: ValueAggType) -> Tensor:
    """Aggregate ``value_BT`` (float ``[B, T]``) over ``mask_BT`` (bool ``[B, T]``).

    Returns a 0-d tensor of the dtype of ``value_BT``. Over an empty mask the means give 0,
    ``token-max`` gives -inf, ``token-min`` +inf, the quantiles 0 and the deviations 1e-5 or 0.
    """
    return _MODES[mode](value_BT, mask_BT)


def _token_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (value_BT * mask_BT).sum() / _count(mask_BT.sum())


def _seq_mean_token_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the rows with at least one masked token of their token means."""
    tokens_B = mask_BT.sum(dim=-1)
    mean_B = (value_BT * mask_BT).sum(dim=-1) / _count(tokens_B)
    filled_B = tokens_B > 0
    return (mean_B * filled_B).sum() / _count(filled_B.sum())


def _token_std(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    squares_BT = (value_BT - _token_mean(value_BT, mask_BT)) ** 2
    return torch.sqrt(_token_mean(squares_BT, mask_BT) + EPSILON)


def _seq_mean_token_std(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    tokens_B = mask_BT.sum(dim=-1)
    length_B = tokens_B.clamp(min=1)
    mean_B = (value_BT * mask_BT).sum(dim=-1) / length_B
    squares_BT = (value_BT - mean_B.unsqueeze(-1)) ** 2 * mask_BT
    std_B = torch.sqrt(squares_BT.sum(dim=-1) / length_B + EPSILON)
    filled_B = tokens_B > 0
    return (std_B * filled_B).sum() / filled_B.sum().clamp(min=1)


def _token_max(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return value_BT.masked_fill(~mask_BT, float("-inf")).max()


def _token_min(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return value_BT.masked_fill(~mask_BT, float("inf")).min()


def _token_quantile(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    def quantile(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
        picked = value_BT[mask_BT]
        # an empty sum is 0 with a gradient of 0; the trainer's constant would stop backward
        if not picked.numel():
            return picked.sum()
        return torch.quantile(picked.float(), share).to(value_BT.dtype)

    return quantile


def _count(tokens: Tensor) -> Tensor:
    # float32 whatever the dtype of the values, as int + float is in torch
    return tokens.to(torch.float32) + EPSILON


_MODES: dict[ValueAggType, Callable[[Tensor, Tensor], Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-std": _seq_mean_token_std,
    "token-max": _token_max,
    "token-min": _token_min,
    "token-std": _token_std,
    "token-p05": _token_quantile(0.05),
    "token-p95": _token_quantile(0.95),
}
