"""Stop tokens from training that the old policy finds very improbable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, loss_mask_patch, mitigation

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="mask-improbable-tokens",
    family="masking",
    summary="Tokens with an old log-probability under -5 nats leave the loss.",
    source="this project",
)
def mask_improbable_tokens(nats: float = 5.0) -> Patch:
    """Dropped where old[t] < -nats. Tokens leave the denominators as well.

    The gradient of log p grows with 1 - p, and rare tokens dominate it; dropping them biases the
    policy towards what it does already.
    """
    if not nats > 0:
        raise PatchError(f"mitigation mask-improbable-tokens: found nats={nats!r}, expected > 0")

    def drop(batch: RankBatch) -> Tensor:
        return batch.column("old_logprobs") < -nats

    return loss_mask_patch(drop)
