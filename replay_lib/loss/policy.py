"""The seven policy losses, one value a token, before any weight or aggregation.

Two families. ``grpo``, ``ppo`` and ``gspo`` differentiate the ratio itself (PPO's surrogate).
``tis``, ``topr``, ``grpo2`` and ``kimi2_5`` weight ``log_prob`` by a ratio that carries no gradient
(REINFORCE with truncated importance sampling), so their value is no surrogate: it depends on the
log-probability itself, and only hard clipping stops a gradient.

Source: AXRL ``GrpoTrainer.get_loss_func`` and the functions it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.loss.inputs import LossInputs
from replay_lib.loss.ratios import token_ratio
from replay_lib.loss.settings import GrpoSettings

#: A ratio counts as clipped when clipping moved it by more than this (not: when it is outside).
_MOVED = 1e-5
#: Below this |advantage| the ratio cannot be read back from the loss; 1 is reported.
_LEAST_ADVANTAGE = 1e-4
#: GSPO bounds its sequence log-ratio from above only, at this many nats.
_GSPO_BOUND = 10.0


@dataclass(frozen=True, kw_only=True)
class PolicyTerm:
    """``loss_BT`` carries the gradient; the ratio before and after clipping is for metrics."""

    loss_BT: Tensor
    ratio_BT: Tensor
    clipped_BT: Tensor


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Bounds of the ratio where ``where_BT`` is true; ``hard``: a clipped token has no gradient."""

    where_BT: Tensor
    low: float = 0.0
    high: float | None = None
    hard: bool = False


def policy_term(settings: GrpoSettings, inputs: LossInputs) -> PolicyTerm:
    """The policy loss of ``settings.loss_type``, ``[B, T]``.

    Off the loss mask the first family has values (aggregation multiplies them by 0), the second
    has zeros.
    """
    return _LOSSES[settings.loss_type](settings, inputs)


def _base(settings: GrpoSettings, inputs: LossInputs) -> Tensor:
    return inputs.old_BT if settings.is_base_logprobs == "old_logprobs" else inputs.rollout_BT


def _grpo(settings: GrpoSettings, inputs: LossInputs) -> PolicyTerm:
    """``max(-A r, -A clip(r))``, and for A < 0 at most ``-c A`` (dual clip).

    PPO: https://arxiv.org/abs/1707.06347; dual clip: https://arxiv.org/abs/1912.09729. At a tie
    torch halves the gradient between both arguments of ``maximum``, in the trainer and here.
    """
    advantage_BT = inputs.advantage_BT
    ratio_BT = token_ratio(inputs.log_prob_BT, _base(settings, inputs))
    loss_BT = _surrogate(settings, advantage_BT, ratio_BT)
    factor = settings.dual_clip_neg_adv_factor
    if factor is not None:
        bounded_BT = torch.minimum(-factor * advantage_BT, loss_BT)
        loss_BT = torch.where(advantage_BT < 0, bounded_BT, loss_BT)
    return _surrogate_term(loss_BT, ratio_BT, advantage_BT)


def _gspo(settings: GrpoSettings, inputs: LossInputs) -> PolicyTerm:
    """PPO's surrogate with one ratio a sequence, each token's gradient straight through.

    The sequence's mean log-ratio over loss tokens is the value, ``log_prob - sg(log_prob)`` the
    gradient. GSPO: https://arxiv.org/abs/2507.18071.
    """
    mask_BT, log_prob_BT = inputs.loss_mask_BT, inputs.log_prob_BT
    log_ratio_BT = (log_prob_BT - _base(settings, inputs)) * mask_BT
    mean_B = log_ratio_BT.sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)
    straight_BT = log_prob_BT - log_prob_BT.detach() + mean_B.detach().unsqueeze(-1)
    ratio_BT = torch.exp(straight_BT.clamp(max=_GSPO_BOUND))
    loss_BT = _surrogate(settings, inputs.advantage_BT, ratio_BT)
    return _surrogate_term(loss_BT, ratio_BT, inputs.advantage_BT)


def _tis(settings: GrpoSettings, inputs: LossInputs) -> PolicyTerm:
    """Truncated importance sampling (https://arxiv.org/abs/2510.13786): the weight is clipped."""
    return _weighted(settings, inputs, lambda _ratio: [_clip_everywhere(settings, inputs, False)])


def _kimi2_5(settings: GrpoSettings, inputs: LossInputs) -> PolicyTerm:
    """TIS with hard clipping (technical report of Kimi K2.5): a clipped token has no gradient."""
    return _weighted(settings, inputs, lambda _ratio: [_clip_everywhere(settings, inputs, True)])


def _topr(settings: GrpoSettings, inputs: LossInputs) -> PolicyTerm:
    """TOPR (https://arxiv.org/abs/2503.14286): weight 1 for A >= 0, ``min(r, 1)`` for A < 0."""
    mask_BT, advantage_BT = inputs.loss_mask_BT, inputs.advantage_BT
    cases = [
        _Case(where_BT=(advantage_BT >= 0) & mask_BT, low=1.0, high=1.0),
        _Case(where_BT=(advantage_BT < 0) & mask_BT, high=1.0),
    ]
    return _weighted(settings, inputs, lambda _ratio: cases)


def _grpo2(settings: GrpoSettings, inputs: LossInputs) -> PolicyTerm:
    """AXRL's own: hard where a token already moved the way its advantage asks, else soft.

    ===========  ======  ===========================================
    advantage    ratio   weight
    ===========  ======  ===========================================
    A >= 0       r > 1   hard clip at ``1 + clip_ratio_high``
    A >= 0       r <= 1  r itself
    A < 0        r > 1   soft clip at ``dual_soft_clip``
    A < 0        r <= 1  hard clip at ``1 - clip_ratio_low``
    ===========  ======  ===========================================
    """

    def cases(ratio_BT: Tensor) -> Sequence[_Case]:
        gain_BT = (inputs.advantage_BT >= 0) & inputs.loss_mask_BT
        cost_BT = (inputs.advantage_BT < 0) & inputs.loss_mask_BT
        # two comparisons, not a comparison and its negation: a NaN ratio belongs to neither side
        above_BT, below_BT = ratio_BT > 1, ratio_BT <= 1
        return [
            _Case(where_BT=gain_BT & above_BT, high=1 + settings.clip_ratio_high, hard=True),
            _Case(where_BT=gain_BT & below_BT),
            _Case(where_BT=cost_BT & above_BT, high=settings.dual_soft_clip),
            _Case(where_BT=cost_BT & below_BT, low=1 - settings.clip_ratio_low, hard=True),
        ]

    return _weighted(settings, inputs, cases)


def _surrogate(settings: GrpoSettings, advantage_BT: Tensor, ratio_BT: Tensor) -> Tensor:
    low, high = 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high
    clipped_BT = ratio_BT.clamp(low, high)
    return torch.maximum(-advantage_BT * ratio_BT, -advantage_BT * clipped_BT)


def _surrogate_term(loss_BT: Tensor, ratio_BT: Tensor, advantage_BT: Tensor) -> PolicyTerm:
    """The clipped ratio is read back from the loss (AXRL ``estimate_clipped_ratio``)."""
    small_BT = advantage_BT.abs() < _LEAST_ADVANTAGE
    read_BT = loss_BT.detach() / -advantage_BT
    clipped_BT = torch.where(small_BT, torch.ones_like(read_BT), read_BT)
    return PolicyTerm(loss_BT=loss_BT, ratio_BT=ratio_BT.detach(), clipped_BT=clipped_BT)


def _clip_everywhere(settings: GrpoSettings, inputs: LossInputs, hard: bool) -> _Case:
    low, high = 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high
    return _Case(where_BT=inputs.loss_mask_BT, low=low, high=high, hard=hard)


def _weighted(
    settings: GrpoSettings, inputs: LossInputs, cases: Callable[[Tensor], Sequence[_Case]]
) -> PolicyTerm:
    """Sum over disjoint cases of ``-A * clip(sg(r)) * log_prob``; zero where no case holds."""
    ratio_BT = token_ratio(inputs.log_prob_BT, _base(settings, inputs)).detach()
    parts = [_weighted_case(case, inputs, ratio_BT) for case in cases(ratio_BT)]
    loss_BT, clipped_BT = parts[0]
    for loss, clipped in parts[1:]:
        loss_BT, clipped_BT = loss_BT + loss, clipped_BT + clipped
    return PolicyTerm(loss_BT=loss_BT, ratio_BT=ratio_BT, clipped_BT=clipped_BT)


def _weighted_case(case: _Case, inputs: LossInputs, ratio_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and clipped ratio of one case (AXRL ``calculate_pg_loss_and_clip_ratio``).

    Each case multiplies and then selects, and the cases are added: so a NaN advantage or ratio
    gives the trainer's pattern, a zero loss with a NaN gradient.
    """
    weight_BT = ratio_BT.clamp(min=case.low, max=case.high)
    loss_BT = -inputs.advantage_BT * weight_BT * inputs.log_prob_BT
    if case.hard:
        moved_BT = (ratio_BT - weight_BT).abs() > _MOVED
        loss_BT = torch.where(moved_BT, loss_BT.detach(), loss_BT)
    zero_BT = torch.zeros_like(ratio_BT)
    return torch.where(case.where_BT, loss_BT, zero_BT), torch.where(
        case.where_BT, weight_BT, zero_BT
    )


_LOSSES: dict[str, Callable[[GrpoSettings, LossInputs], PolicyTerm]] = {
    "grpo": _grpo,
    "ppo": _grpo,
    "tis": _tis,
    "gspo": _gspo,
    "grpo2": _grpo2,
    "topr": _topr,
    "kimi2_5": _kimi2_5,
}
