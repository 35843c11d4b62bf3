"""Add a penalty on the distance to the reference policy."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="add-kl-to-reference",
    family="settings",
    summary="KL term against the reference policy, coefficient 0.01.",
    source="AXRL kl_control_alpha and kl_base_logprobs",
)
def add_kl_to_reference(alpha: float = 0.01) -> Patch:
    """loss += alpha * KL(current, reference), estimated per token by the trainer's own estimator.

    Limits: at the first update after the reference was reset the term and its gradient are near
    zero.
    """
    if not alpha > 0:
        raise PatchError(f"mitigation add-kl-to-reference: found alpha={alpha!r}, expected > 0")
    return settings_patch(kl_control_alpha=float(alpha), kl_base_logprobs="ref_logprobs")
