"""Replay saved routes on positions that do not train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.patch import Patch, mitigation, routing_patch

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="replay-r3-on-prompt-tokens-only",
    family="routing",
    summary="Saved routes where the loss mask is false, current routing on trainable positions.",
    source="this project, the complement of replay-r3-on-loss-tokens-only",
    diagnostic=True,
)
def replay_r3_on_prompt_tokens_only() -> Patch:
    """replayed'[b, t, l] = replayed[b, t, l] and not loss_mask[b, t].

    The loss mask is label-aligned: the last prompt token predicts the first response token and
    counts as trainable. Beside its complement it tells which tokens' routes are at fault.
    """

    def apply(replayed_BTL: Tensor, batch: RankBatch) -> Tensor:
        trainable_BT = batch.loss_mask.bool().to(replayed_BTL.device)
        return replayed_BTL & ~trainable_BT.unsqueeze(2)

    return routing_patch(apply)
