"""Let the model choose where it would give the saved experts far less than its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, router_patch

if TYPE_CHECKING:
    from torch import Tensor


@mitigation(
    slug="use-current-routing-on-disagreement",
    family="routing",
    summary="Current routing where the saved experts score 0.2 less than the model's own choice.",
    source="this project",
)
def use_current_routing_on_disagreement(margin: float = 0.2) -> Patch:
    """replayed' = replayed and score(own top-k) - score(saved) <= margin, a token and MoE layer."""
    if not margin >= 0:
        where = "mitigation use-current-routing-on-disagreement"
        raise PatchError(f"{where}: found margin={margin!r}, expected a number >= 0")

    def apply(replayed_N: Tensor, own_N: Tensor, saved_N: Tensor) -> Tensor:
        return replayed_N & (own_N - saved_N <= margin)

    return router_patch(apply)
