"""Clip the gradient by how far its norm lies from the recent ones."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import AfterNorm, Norms, mitigation


@mitigation(
    slug="zclip",
    family="optimizer",
    summary="Norms over 2.5 deviations above the median are pulled back, the further the more.",
    source="ZClip, https://arxiv.org/abs/2504.02507",
    after_norm=True,
)
def zclip(z: float = 2.5, deviation: float = 0.25) -> AfterNorm:
    """ZClip: with z = (norm - m) / s the norm becomes m + s * z0^2 / z where z > z0, else it stays.

    The method keeps running means m and deviations s of the norm. A snapshot holds the median
    alone: m is that, and s is ``deviation`` times it (a quarter, as quiet norms of the zoo
    scatter), so the figure shows the size of the answer, not a run's own threshold.
    """
    if not (z > 0 and deviation > 0):
        raise PatchError(
            f"mitigation zclip: found z={z!r}, deviation={deviation!r}, expected both > 0"
        )

    def answer(norms: Norms) -> float | None:
        if norms.median is None or not norms.median > 0:
            return None  # no recent norm to compare with
        spread = deviation * norms.median
        score = (norms.norm - norms.median) / spread
        return norms.norm if score <= z else norms.median + spread * z**2 / score

    return AfterNorm(answer)
