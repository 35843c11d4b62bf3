"""Replay the step with the topr loss."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-topr-loss",
    family="settings",
    summary="Policy loss by TOPR.",
    source="https://arxiv.org/abs/2503.14286; AXRL loss_type",
)
def use_topr_loss() -> Patch:
    """loss_type = topr: -A w log p with w = 1 for A >= 0 and min(r, 1) for A < 0.

    Filters, weights, aggregation and denominators stay as configured.
    """
    return settings_patch(loss_type="topr")
