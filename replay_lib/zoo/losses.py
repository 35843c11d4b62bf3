"""The loss settings of the runs; they are saved in the snapshots."""

from __future__ import annotations

from replay_lib.loss import GrpoSettings

#: The ordinary loss: grpo2 with token means; clipping as AXRL's defaults have it (.2, .28, 3).
ORDINARY = GrpoSettings()

#: A ratio to the rollout engine's log-probabilities that nothing clips: what the natural spikes
#: of stale rollouts need.
UNCLIPPED = GrpoSettings(
    is_base_logprobs="rollout_logprobs",
    clip_ratio_low=1.0,
    clip_ratio_high=1.0e6,
    dual_soft_clip=1.0e6,
)
