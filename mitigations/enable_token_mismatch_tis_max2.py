"""Weight each token's policy loss by old / rollout probability, capped from above."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="enable-token-mismatch-tis-max2",
    family="settings",
    summary="Truncated importance weight old/rollout on the policy loss, capped at 2.",
    source="XYZ-AI-Lab/axrl, spike-mitigation-methods/enable-token-mismatch-tis-max2.md",
)
def enable_token_mismatch_tis_max2(clip_max: float = 2.0) -> Patch:
    """Switch token importance sampling between trainer and rollout engine on.

    policy_loss[t] *= min(exp(clamp(old[t] - rollout[t], -20, 20)), clip_max) on loss tokens, with
    no gradient through the weight. Denominators, KL and entropy stay as they are.

    Limits: needs rollout log-probabilities in the batch. Where the run already uses the rollout's
    log-probabilities as the base of its ratio, the mismatch is corrected twice; the kimi2_5 loss
    refuses it.
    """
    if not clip_max > 0:
        raise PatchError(
            f"mitigation enable-token-mismatch-tis-max2: found clip_max={clip_max!r}, expected > 0"
        )
    return settings_patch(mismatch_token_clip_max=float(clip_max))
