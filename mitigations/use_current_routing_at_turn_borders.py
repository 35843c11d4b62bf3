"""Current routing on the tokens where prompt and response meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, routing_patch

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="use-current-routing-at-turn-borders",
    family="routing",
    summary="Current routing on both sides of each border between tokens that train and others.",
    source="this project",
)
def use_current_routing_at_turn_borders(width: int = 1) -> Patch:
    """Current routing on the tokens where prompt and response meet.

    replayed'[b, t, l] is false for c - width < t <= c + width, c a position where the loss mask
    changes. The mask is label-aligned: it turns true on the last prompt token and false on the
    last response token, so the ``width`` tokens on either side of each border are current.

    Rollout engines hand prompts and responses to different kernels, and an offset by one shows
    there first.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise PatchError(
            f"mitigation use-current-routing-at-turn-borders: found width={width!r}, "
            "expected a whole number >= 1"
        )

    def apply(replayed_BTL: Tensor, batch: RankBatch) -> Tensor:
        mask_BT = batch.loss_mask.bool().to(replayed_BTL.device)
        change_BT = mask_BT.new_zeros(mask_BT.shape)
        change_BT[:, 1:] = mask_BT[:, 1:] != mask_BT[:, :-1]
        near_BT = change_BT.clone()
        for step in range(1, width + 1):
            near_BT[:, step:] |= change_BT[:, :-step]
            if step < width:
                near_BT[:, :-step] |= change_BT[:, step:]
        return replayed_BTL & ~near_BT.unsqueeze(2)

    return routing_patch(apply)
