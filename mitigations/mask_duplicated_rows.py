"""Let each distinct row train once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.patch import Patch, loss_mask_patch, mitigation

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="mask-duplicated-rows",
    family="masking",
    summary="Of rows with the same tokens all but the first leave the loss.",
    source="this project",
)
def mask_duplicated_rows() -> Patch:
    """Dropped where an earlier row of the same data-parallel rank holds the same tokens.

    Duplicates among the rollouts of one prompt are ordinary at low temperature; a bug that
    repeats a batch shows as many.
    """

    def drop(batch: RankBatch) -> Tensor:
        seen: set[tuple[int, ...]] = set()
        repeated: list[bool] = []
        for row, length in enumerate(batch.lengths()):
            tokens = tuple(batch.input_ids[row, :length].tolist())
            repeated.append(tokens in seen)
            seen.add(tokens)
        return batch.loss_mask.new_tensor(repeated)

    return loss_mask_patch(drop)
