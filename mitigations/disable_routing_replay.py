"""Replay no saved routes at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.patch import Patch, mitigation, routing_patch

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="disable-routing-replay",
    family="routing",
    summary="Current routing everywhere; shows whether saved routes cause the spike.",
    source="XYZ-AI-Lab/axrl, spike-mitigation-methods/disable-routing-replay.md",
    diagnostic=True,
)
def disable_routing_replay() -> Patch:
    """Force no saved route anywhere.

    replayed'[b, t, l] = false.

    A diagnostic: without rollout routing replay the trainer optimises another policy than the one
    that was sampled, so a pass names a cause and is never called proven.
    """

    def apply(replayed_BTL: Tensor, batch: RankBatch) -> Tensor:
        return replayed_BTL.new_zeros(replayed_BTL.shape)

    return routing_patch(apply)
