"""Let the model choose the experts of its first MoE layers, replay the routes of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, routing_patch

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="use-current-routing-for-first-moe-layer",
    family="routing",
    summary="Current routing in the first MoE layer, saved routes in all later ones.",
    source="XYZ-AI-Lab/axrl, spike-mitigation-methods/use-current-routing-for-first-moe-layer.md",
)
def use_current_routing_for_first_moe_layer(layers: int = 1) -> Patch:
    """Do not force saved routes in the first ``layers`` MoE layers (dense layers do not count).

    replayed'[b, t, l] = replayed[b, t, l] and l >= layers.

    Limits: with ``layers`` equal to the number of MoE layers nothing is replayed any more.
    """
    where = "mitigation use-current-routing-for-first-moe-layer"
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise PatchError(f"{where}: found layers={layers!r}, expected a whole number >= 1")

    def apply(replayed_BTL: Tensor, batch: RankBatch) -> Tensor:
        present = replayed_BTL.shape[2]
        if layers > present:
            raise PatchError(
                f"{where}: found layers={layers}, expected at most the model's {present} MoE layers"
            )
        current_BTL = replayed_BTL.clone()
        current_BTL[:, :, :layers] = False
        return current_BTL

    return routing_patch(apply)
