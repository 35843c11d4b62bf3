"""Push tokens evenly over the experts."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, model_patch


@mitigation(
    slug="add-load-balancing-loss",
    family="router",
    summary="Auxiliary load-balancing loss, coefficient 0.01.",
    source="Switch Transformer, https://arxiv.org/abs/2101.03961; Megatron-Core moe_aux_loss_coeff",
)
def add_load_balancing_loss(coeff: float = 1e-2) -> Patch:
    """Push tokens evenly over the experts.

    loss += coeff * experts * sum over experts of (share of tokens * mean probability), per MoE
    layer.

    With routes replayed the shares are those of the saved routes. It adds a gradient of its own and
    cannot lower a norm by itself in one step.
    """
    if not coeff > 0:
        raise PatchError(f"mitigation add-load-balancing-loss: found coeff={coeff!r}, expected > 0")
    return model_patch(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=float(coeff))
