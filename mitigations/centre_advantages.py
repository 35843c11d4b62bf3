"""Subtract the mean advantage of a data-parallel rank's loss tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.patch import Patch, batch_patch, mitigation

if TYPE_CHECKING:
    from replay_lib.batch import RankBatch


@mitigation(
    slug="centre-advantages",
    family="advantage",
    summary="Advantages of each data-parallel rank sum to zero over loss tokens.",
    source="this project",
)
def centre_advantages() -> Patch:
    """Subtract the mean advantage of a data-parallel rank's loss tokens.

    a'[t] = a[t] - mean of a over the rank's loss tokens; positions off the mask stay as they
    are.

    Unlike balancing it keeps differences between tokens, so signs may change. Each recorded
    data-parallel rank has its own mean.
    """

    def apply(batch: RankBatch) -> RankBatch:
        mask_BT = batch.loss_mask
        if not bool(mask_BT.any()):
            return batch
        centred_BT = batch.advantage - batch.advantage[mask_BT].mean()
        return batch.replace(advantage=centred_BT.where(mask_BT, batch.advantage))

    return batch_patch(apply)
