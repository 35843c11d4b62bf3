"""Pull the policy entropy towards a target."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="add-entropy-control",
    family="settings",
    summary="Entropy term alpha * (target - entropy)^2 in the loss.",
    source="AXRL entropy_control",
)
def add_entropy_control(alpha: float = 0.1, target: float = 0.1) -> Patch:
    """loss += alpha * (target - mean entropy)^2, entropies in nats over loss tokens.

    It adds a gradient of its own; it can only help where a collapse of entropy is the cause.
    """
    if not alpha > 0:
        raise PatchError(f"mitigation add-entropy-control: found alpha={alpha!r}, expected > 0")
    return settings_patch(entropy_control={"alpha": float(alpha), "target_entropy": float(target)})
