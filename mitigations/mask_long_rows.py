"""Stop rows from training that are far longer than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, loss_mask_patch, mitigation

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="mask-long-rows",
    family="masking",
    summary="Rows with over 2 times the median number of loss tokens leave the loss.",
    source="this project",
)
def mask_long_rows(factor: float = 2.0) -> Patch:
    """Stop rows from training that are far longer than the others.

    length[b] = loss tokens of row b; dropped where length[b] > factor * median of the lengths >
    0.

    The median is over the rank's rows that train (of an even number the lower one). The rows
    leave the denominators as well.
    """
    if not factor > 0:
        raise PatchError(f"mitigation mask-long-rows: found factor={factor!r}, expected > 0")

    def drop(batch: RankBatch) -> Tensor:
        length_B = batch.loss_mask.sum(dim=1)
        present = length_B[length_B > 0]
        if present.numel() == 0:
            return length_B > 0
        return length_B > factor * present.median()

    return loss_mask_patch(drop)
