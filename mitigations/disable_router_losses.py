"""Replay without auxiliary and z-loss."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, model_patch


@mitigation(
    slug="disable-router-losses",
    family="router",
    summary="No load-balancing loss and no z-loss of the routers.",
    source="Megatron-Core moe_aux_loss_coeff, moe_z_loss_coeff",
    diagnostic=True,
)
def disable_router_losses() -> Patch:
    """moe_aux_loss_coeff = 0, moe_z_loss_coeff = none, no load balancing.

    Both losses add gradients that the reward knows nothing of. Where the run had none, the
    verdict is no_op. It changes what the training optimises, so it is a diagnostic.
    """
    return model_patch(
        moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, moe_router_load_balancing_type="none"
    )
