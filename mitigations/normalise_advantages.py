"""Give a data-parallel rank's advantages mean 0 and deviation 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, batch_patch, mitigation

if TYPE_CHECKING:
    from replay_lib.batch import RankBatch


@mitigation(
    slug="normalise-advantages",
    family="advantage",
    summary="Advantages of each data-parallel rank standardised over loss tokens.",
    source="AXRL normalize_advantages_over_valid_tokens_in_batch (there over the whole batch)",
    changes_unit=True,
)
def normalise_advantages(eps: float = 1e-8) -> Patch:
    """a'[t] = (a[t] - mean) / deviation, both over the rank's loss tokens (n - 1 in the deviation).

    Nothing changes where the deviation is at most ``eps`` or not finite. The scale of the loss
    changes, so it is also judged by the quiet control's scale.
    """
    if not eps >= 0:
        raise PatchError(f"mitigation normalise-advantages: found eps={eps!r}, expected >= 0")

    def apply(batch: RankBatch) -> RankBatch:
        mask_BT = batch.loss_mask
        trained = batch.advantage[mask_BT]
        deviation = trained.std() if trained.numel() > 1 else trained.sum() * 0
        if not bool(deviation > eps):
            return batch
        scaled_BT = (batch.advantage - trained.mean()) / deviation
        return batch.replace(advantage=scaled_BT.where(mask_BT, batch.advantage))

    return batch_patch(apply)
