"""Clip the policy ratio closer to 1."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="tighten-ratio-clip",
    family="settings",
    summary="Ratio clip at 1 - 0.1 and 1 + 0.1.",
    source="https://arxiv.org/abs/1707.06347; AXRL clip_ratio_low and clip_ratio_high",
)
def tighten_ratio_clip(low: float = 0.1, high: float = 0.1) -> Patch:
    """Clip the policy ratio closer to 1.

    clip_ratio_low = ``low`` and clip_ratio_high = ``high``: the ratio's bounds are 1 - low and
    1 + high.

    Limits: on the first update of a window with the old policy as base, ratios are 1 and nothing is
    clipped.
    """
    if not (0 < low <= 1 and high > 0):
        raise PatchError(
            f"mitigation tighten-ratio-clip: found low={low!r}, high={high!r}, "
            "expected 0 < low <= 1 and high > 0"
        )
    return settings_patch(clip_ratio_low=float(low), clip_ratio_high=float(high))
