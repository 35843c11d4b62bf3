"""Weight down tokens that the trainer finds less probable than the rollout engine did."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="enable-token-mismatch-tis-below-one",
    family="settings",
    summary="Importance weight old/rollout on the policy loss where it is below 1, else 1.",
    source="XYZ-AI-Lab/axrl, spike-mitigation-methods/enable-token-mismatch-tis-max2.md",
)
def enable_token_mismatch_tis_below_one() -> Patch:
    """One-sided token importance sampling: weight = min(exp(old - rollout), 1).

    The published study of TIS replays this half alone to show that both halves are needed where
    gradients cancel.
    """
    return settings_patch(mismatch_token_clip_max=1.0)
