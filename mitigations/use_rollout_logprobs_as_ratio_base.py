"""Measure the policy ratio from the rollout engine instead of the old policy."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-rollout-logprobs-as-ratio-base",
    family="settings",
    summary="The ratio of the policy loss is current / rollout.",
    source="AXRL is_base_logprobs",
)
def use_rollout_logprobs_as_ratio_base() -> Patch:
    """ratio[t] = exp(current[t] - rollout[t]).

    The ratio clip then acts on what separates trainer and rollout engine as well as on the policy's
    own movement. Refused with the ppo loss, which defines its ratio by the old policy.

    Limits: with token importance sampling on, the mismatch is corrected twice.
    """
    return settings_patch(is_base_logprobs="rollout_logprobs")
