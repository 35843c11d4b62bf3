"""Stop rows from training that the old policy finds improbable throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, loss_mask_patch, mitigation

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="mask-improbable-rows",
    family="masking",
    summary="Rows whose mean old log-probability is under -2 nats leave the loss.",
    source="this project",
)
def mask_improbable_rows(nats: float = 2.0) -> Patch:
    """mean[b] = mean over loss tokens of old[t]; dropped where mean[b] < -nats.

    Garbled rows (random tokens, a broken detokeniser, another model's text) stand out by it.
    The rows leave the denominators as well.
    """
    if not nats > 0:
        raise PatchError(f"mitigation mask-improbable-rows: found nats={nats!r}, expected > 0")

    def drop(batch: RankBatch) -> Tensor:
        total_B = (batch.column("old_logprobs") * batch.loss_mask).sum(dim=1)
        return total_B / batch.loss_mask.sum(dim=1).clamp(min=1) < -nats

    return loss_mask_patch(drop)
