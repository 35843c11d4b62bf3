"""Which tokens keep their policy term, and with which weight: trainer against rollout engine.

Two ratios are at work. Weights, IcePop and the veto use ``old / rollout``: how far the two engines
are apart on the same weights. The sequence mask uses ``current / rollout``. Filters act on the
policy term alone: KL, entropy, means and denominators go on counting the recorded loss mask.

Sources: AXRL ``GrpoTrainer.truncate_mismatch_token_ratio``, ``get_icepop_token_mask`` and
``get_mismatch_sequence_mask``; https://fengyao.notion.site/off-policy-rl (capped weights),
https://hijkzzz.notion.site/online-ice-pop, https://richardli.xyz/rl-collapse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.loss.inputs import LossInputs
from replay_lib.loss.ratios import sequence_ratio, token_ratio
from replay_lib.loss.settings import GrpoSettings

#: A weight is counted as capped when the cap moved it by more than this.
_CAPPED = 1e-4


@dataclass(frozen=True, kw_only=True)
class PolicyFilter:
    """Verdicts of all filters on a micro-batch; nothing here carries a gradient."""

    mismatch_BT: Tensor  # old / rollout; 1 off the loss mask
    weight_BT: Tensor  # the same, capped; ones without a cap
    capped_BT: Tensor  # bool, true: the cap changed the weight (for metrics)
    low_B1: Tensor  # bool, true: kept
    high_B1: Tensor
    veto_B1: Tensor
    icepop_BT: Tensor

    @property
    def sequence_B1(self) -> Tensor:
        """Rows that pass the low and the high bound and the veto, bool ``[B, 1]``."""
        return self.low_B1 & self.high_B1 & self.veto_B1

    @property
    def keep_BT(self) -> Tensor:
        """Positions that pass all filters (the loss mask is not one), bool ``[B, T]``."""
        return self.sequence_B1 & self.icepop_BT

    @property
    def policy_weight_BT(self) -> Tensor:
        """What multiplies the policy term of each position (AXRL ``policy_mismatch_tir``)."""
        dtype = self.weight_BT.dtype
        return self.weight_BT * self.sequence_B1.to(dtype) * self.icepop_BT.to(dtype)


@torch.no_grad()
def policy_filter(settings: GrpoSettings, inputs: LossInputs) -> PolicyFilter:
    """Apply every filter that ``settings`` switches on; bounds themselves are kept."""
    mismatch_BT = mismatch_ratio(inputs)
    cap = settings.mismatch_token_clip_max
    capped_BT = mismatch_BT if cap is None else mismatch_BT.clamp(max=cap)
    low_B1, high_B1 = _sequence_bounds(settings, inputs)
    return PolicyFilter(
        mismatch_BT=mismatch_BT,
        weight_BT=torch.ones_like(mismatch_BT) if cap is None else capped_BT,
        capped_BT=(capped_BT - mismatch_BT).abs() > _CAPPED,
        low_B1=low_B1,
        high_B1=high_B1,
        veto_B1=_veto(mismatch_BT, settings.mismatch_token_veto_threshold),
        icepop_BT=_icepop(mismatch_BT, settings.icepop_masking_low, settings.icepop_masking_high),
    )


def mismatch_ratio(inputs: LossInputs) -> Tensor:
    """``old / rollout`` on loss tokens and 1 elsewhere, ``[B, T]``."""
    ratio_BT = token_ratio(inputs.old_BT, inputs.rollout_BT)
    return torch.where(inputs.loss_mask_BT, ratio_BT, torch.ones_like(ratio_BT))


def _icepop(mismatch_BT: Tensor, low: float | None, high: float | None) -> Tensor:
    # written as "not outside": a NaN ratio is kept, as the trainer keeps it, and poisons the loss
    outside_BT = torch.zeros_like(mismatch_BT, dtype=torch.bool)
    if low is not None:
        outside_BT = outside_BT | (mismatch_BT < low)
    if high is not None:
        outside_BT = outside_BT | (mismatch_BT > high)
    return ~outside_BT


def _sequence_bounds(settings: GrpoSettings, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    ratio_B1 = sequence_ratio(inputs.log_prob_BT, inputs.rollout_BT, inputs.loss_mask_BT)
    low, high = settings.mismatch_seq_masking_low, settings.mismatch_seq_masking_high
    every = torch.ones_like(ratio_B1, dtype=torch.bool)
    return (
        every if low is None else ratio_B1 >= low,
        every if high is None else ratio_B1 <= high,
    )


def _veto(mismatch_BT: Tensor, threshold: float | None) -> Tensor:
    """Rows whose least ratio reaches ``threshold``.

    The minimum is over all positions, and off the loss mask the ratio is 1: a threshold above 1
    drops every row that has such a position.
    """
    least_B1 = mismatch_BT.amin(dim=-1, keepdim=True)
    if threshold is None:
        return torch.ones_like(least_B1, dtype=torch.bool)
    return least_B1 >= threshold
