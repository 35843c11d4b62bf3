"""Stop rows from training whose advantage stands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, loss_mask_patch, mitigation

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="mask-rows-by-advantage",
    family="masking",
    summary="Rows whose largest |advantage| is over 3 times the median row leave the loss.",
    source="this project",
)
def mask_rows_by_advantage(factor: float = 3.0) -> Patch:
    """Stop rows from training whose advantage stands out.

    size[b] = max over loss tokens of |a|; dropped where size[b] > factor * median of the sizes
    > 0.

    The median is over the rank's rows that have any advantage (of an even number the lower
    one). The rows leave the denominators as well.
    """
    if not factor > 0:
        raise PatchError(
            f"mitigation mask-rows-by-advantage: found factor={factor!r}, expected > 0"
        )

    def drop(batch: RankBatch) -> Tensor:
        size_B = (batch.advantage.abs() * batch.loss_mask).amax(dim=1)
        present = size_B[size_B > 0]
        if present.numel() == 0:
            return size_B > 0
        return size_B > factor * present.median()

    return loss_mask_patch(drop)
