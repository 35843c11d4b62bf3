"""Weight each token by old / rollout probability, with a higher cap."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="enable-token-mismatch-tis-max5",
    family="settings",
    summary="Truncated importance weight old/rollout on the policy loss, capped at 5.",
    source="https://fengyao.notion.site/off-policy-rl; AXRL mismatch_token_clip_max",
)
def enable_token_mismatch_tis_max5() -> Patch:
    """Token importance sampling with cap 5: weight = min(exp(old - rollout), 5).

    Beside the cap of 2 it tells whether the cap acts at all: equal results mean that no token lies
    above 2.
    """
    return settings_patch(mismatch_token_clip_max=5.0)
