"""Measure the policy ratio from the old policy instead of the rollout engine."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-old-logprobs-as-ratio-base",
    family="settings",
    summary="The ratio of the policy loss is current / old.",
    source="AXRL is_base_logprobs",
)
def use_old_logprobs_as_ratio_base() -> Patch:
    """ratio[t] = exp(current[t] - old[t]).

    On the first update of a window the ratio is then 1 whatever the rollout engine said.
    Refused with the kimi2_5 loss, which defines its ratio by the rollout engine.
    """
    return settings_patch(is_base_logprobs="old_logprobs")
