"""Bound advantages on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, batch_patch, mitigation

if TYPE_CHECKING:
    from replay_lib.batch import RankBatch


@mitigation(
    slug="clip-advantages",
    family="advantage",
    summary="Advantages within -1 and 1.",
    source="this project",
)
def clip_advantages(bound: float = 1.0) -> Patch:
    """a'[t] = min(max(a[t], -bound), bound).

    Limits: it keeps every sign, so what spikes by the balance of signs goes on spiking.
    """
    if not bound > 0:
        raise PatchError(f"mitigation clip-advantages: found bound={bound!r}, expected > 0")

    def apply(batch: RankBatch) -> RankBatch:
        return batch.replace(advantage=batch.advantage.clamp(-bound, bound))

    return batch_patch(apply)
