"""Replay the step with the kimi2_5 loss."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-kimi-loss",
    family="settings",
    summary="Weight clip(current/rollout) on log-probabilities, clipped tokens without gradient.",
    source="technical report of Kimi K2.5; AXRL loss_type",
)
def use_kimi_loss() -> Patch:
    """Replay the step with the kimi2_5 loss.

    loss_type = kimi2_5: -A clip(r) log p with r = current / rollout; a clipped token has no
    gradient.

    The loss wants the rollout engine as base and no token importance sampling: both are set
    with it.
    """
    return settings_patch(
        loss_type="kimi2_5", is_base_logprobs="rollout_logprobs", mismatch_token_clip_max=None
    )
