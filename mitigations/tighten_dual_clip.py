"""Bound the loss of tokens with negative advantage more tightly."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="tighten-dual-clip",
    family="settings",
    summary="Dual clip at 1.5 instead of 3 (dual_soft_clip, dual_clip_neg_adv_factor).",
    source="https://arxiv.org/abs/1912.09729; AXRL dual_soft_clip and dual_clip_neg_adv_factor",
)
def tighten_dual_clip(bound: float = 1.5) -> Patch:
    """Both dual clips at ``bound``.

    grpo2: for A < 0 and ratio > 1 the weight is at most ``bound``; grpo and ppo: for A < 0 the
    loss is at most ``bound`` * |A|.

    Limits: on the first update of a window with the old policy as base, ratios are 1 and no bound
    above 1 acts.
    """
    if not bound > 1:
        raise PatchError(f"mitigation tighten-dual-clip: found bound={bound!r}, expected > 1")
    return settings_patch(dual_soft_clip=float(bound), dual_clip_neg_adv_factor=float(bound))
