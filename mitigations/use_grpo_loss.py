"""Replay the step with the grpo loss."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-grpo-loss",
    family="settings",
    summary="Policy loss by PPO's clipped surrogate.",
    source="https://arxiv.org/abs/1912.09729; AXRL loss_type",
)
def use_grpo_loss() -> Patch:
    """Replay the step with the grpo loss.

    loss_type = grpo: max(-A r, -A clip(r)), differentiated through the ratio, with the dual
    clip for A < 0.

    Filters, weights, aggregation and denominators stay as configured.
    """
    return settings_patch(loss_type="grpo")
