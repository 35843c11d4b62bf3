"""Keep router logits small by a z-loss."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, model_patch


@mitigation(
    slug="add-router-z-loss",
    family="router",
    summary="z-loss on the routers' logits, coefficient 0.001.",
    source="ST-MoE, https://arxiv.org/abs/2202.08906; Megatron-Core moe_z_loss_coeff",
)
def add_router_z_loss(coeff: float = 1e-3) -> Patch:
    """loss += coeff * mean over tokens of logsumexp(router logits)^2, in every MoE layer.

    It adds a gradient of its own and cannot lower a norm by itself in one step; over a run it keeps
    scores from growing.
    """
    if not coeff > 0:
        raise PatchError(f"mitigation add-router-z-loss: found coeff={coeff!r}, expected > 0")
    return model_patch(moe_z_loss_coeff=float(coeff))
