"""Replay saved routes on trainable positions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.patch import Patch, mitigation, routing_patch

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="replay-r3-on-loss-tokens-only",
    family="routing",
    summary="Saved routes where the loss mask is true, current routing on prompt tokens.",
    source="XYZ-AI-Lab/axrl, spike-mitigation-methods/replay-r3-on-loss-tokens-only.md",
)
def replay_r3_on_loss_tokens_only() -> Patch:
    """Force saved routes only where the loss mask is true, in every MoE layer.

    replayed'[b, t, l] = replayed[b, t, l] and loss_mask[b, t].

    The loss mask is label-aligned: a position replays if the token after it is trainable, so the
    last prompt token replays and the last response token does not. This is what the trainer's
    own option ``replay_routing_for_loss_tokens_only`` does.
    """

    def apply(replayed_BTL: Tensor, batch: RankBatch) -> Tensor:
        trainable_BT = batch.loss_mask.bool().to(replayed_BTL.device)
        return replayed_BTL & trainable_BT.unsqueeze(2)

    return routing_patch(apply)
