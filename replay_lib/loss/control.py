"""What holds the policy in place: the KL and the entropy term. Both use the recorded loss mask."""

from __future__ import annotations

import torch
from torch import Tensor

from replay_lib.loss.aggregate import aggregate
from replay_lib.loss.inputs import LossInputs
from replay_lib.loss.settings import GrpoSettings


def kl_term(settings: GrpoSettings, inputs: LossInputs) -> Tensor:
    """``aggregate((log_prob - base)^2 / 2)``, the k2 estimate, before its weight; 0-d.

    The trainer computes it always and multiplies it by ``kl_control_alpha``, also when that is 0:
    one -inf anywhere in a row makes the loss NaN with KL control off. The base is the old policy
    by default, not the reference. k2: http://joschu.net/blog/kl-approx.html. Its inputs are
    rounded to float32, as in the trainer, also where all the rest is float64.
    Source: AXRL ``GrpoTrainer.get_kl_loss``, ``kl_utils.kl_divergence``.
    """
    base_BT = inputs.old_BT if settings.kl_base_logprobs == "old_logprobs" else inputs.ref_BT
    k2_BT = (inputs.log_prob_BT.float() - base_BT.float()) ** 2 / 2
    return aggregate(k2_BT, inputs.loss_mask_BT, settings.loss_agg_type)


def entropy_term(settings: GrpoSettings, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """``((target - H)^2, H)`` with H the aggregate over the micro-batch, before its weight; 0-d.

    The square is outside the mean. With ``alpha <= 0`` the first is a constant 0, so the loss does
    not depend on entropies at all. Source: AXRL ``GrpoTrainer.get_entropy_loss``.
    """
    control = settings.entropy_control
    mask_BT = inputs.loss_mask_BT
    if control.top_quantile < 1.0:
        mask_BT = top_entropy_mask(inputs.entropy_BT, mask_BT, control.top_quantile)
    entropy = aggregate(inputs.entropy_BT, mask_BT, settings.loss_agg_type)
    if control.alpha <= 0.0:
        return torch.zeros_like(entropy), entropy.detach()
    return (control.target_entropy - entropy) ** 2, entropy.detach()


@torch.no_grad()
def top_entropy_mask(entropy_BT: Tensor, loss_mask_BT: Tensor, top_quantile: float) -> Tensor:
    """Each row's ``ceil(n * top_quantile)`` loss tokens of largest entropy, at least one; bool.

    Tokens equal to the last one picked are picked too. Source: AXRL ``get_top_entropy_mask``.
    """
    least = torch.finfo(entropy_BT.dtype).min
    entropy_BT = entropy_BT.masked_fill(~loss_mask_BT, least)
    # in float32, as the trainer counts: .1 of 10 tokens is 1 there, and 2 for some other shares
    picked_B = torch.ceil(loss_mask_BT.sum(dim=-1).to(torch.float32) * top_quantile)
    last_B1 = picked_B.to(torch.int64).clamp(min=1).unsqueeze(-1) - 1
    threshold_B1 = entropy_BT.sort(dim=-1, descending=True).values.gather(-1, last_B1)
    return (entropy_BT >= threshold_B1) & loss_mask_BT
