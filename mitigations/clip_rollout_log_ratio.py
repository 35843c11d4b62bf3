"""Bound how far the rollout engine may be from the old policy on one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, batch_patch, mitigation

if TYPE_CHECKING:
    from replay_lib.batch import RankBatch


@mitigation(
    slug="clip-rollout-log-ratio",
    family="masking",
    summary="The rollout's log-probabilities moved to within 0.1 nats of the old policy's.",
    source="this project",
)
def clip_rollout_log_ratio(bound: float = 0.1) -> Patch:
    """rollout'[t] = min(max(rollout[t], old[t] - bound), old[t] + bound), in nats, on loss tokens.

    It acts wherever the loss reads the rollout's log-probabilities: ratio base, importance weights,
    masks. Where none of these is on, nothing changes and the verdict is no_op.
    """
    if not bound > 0:
        raise PatchError(f"mitigation clip-rollout-log-ratio: found bound={bound!r}, expected > 0")

    def apply(batch: RankBatch) -> RankBatch:
        old_BT, rollout_BT = batch.column("old_logprobs"), batch.column("rollout_logprobs")
        near_BT = rollout_BT.clamp(old_BT - bound, old_BT + bound)
        return batch.replace(rollout_logprobs=near_BT.where(batch.loss_mask, rollout_BT))

    return batch_patch(apply)
