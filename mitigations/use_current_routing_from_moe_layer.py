"""Replay the routes of the first MoE layers, let the model choose in all later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, routing_patch

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="use-current-routing-from-moe-layer",
    family="routing",
    summary="Saved routes in the first MoE layer, current routing from the next one on.",
    source="this project",
)
def use_current_routing_from_moe_layer(layer: int = 1) -> Patch:
    """replayed'[b, t, l] = replayed[b, t, l] and l < layer, counting MoE layers from 0.

    The complement of use-current-routing-for-first-moe-layer: together they tell in which depth
    wrong routes act.
    """
    where = "mitigation use-current-routing-from-moe-layer"
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise PatchError(f"{where}: found layer={layer!r}, expected a whole number >= 0")

    def apply(replayed_BTL: Tensor, batch: RankBatch) -> Tensor:
        present = replayed_BTL.shape[2]
        if layer >= present:
            raise PatchError(
                f"{where}: found layer={layer}, expected at most {present - 1}, the model's last "
                "MoE layer"
            )
        current_BTL = replayed_BTL.clone()
        current_BTL[:, :, layer:] = False
        return current_BTL

    return routing_patch(apply)
