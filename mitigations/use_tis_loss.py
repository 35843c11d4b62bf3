"""Replay the step with the tis loss."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-tis-loss",
    family="settings",
    summary="Policy loss by truncated importance sampling.",
    source="https://arxiv.org/abs/2510.13786; AXRL loss_type",
)
def use_tis_loss() -> Patch:
    """loss_type = tis: -A clip(r) log p, no gradient through r.

    Filters, weights, aggregation and denominators stay as configured.
    """
    return settings_patch(loss_type="tis")
