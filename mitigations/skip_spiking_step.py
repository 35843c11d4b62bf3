"""Take no step where the norm stands out."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import AfterNorm, Norms, clipped, mitigation


@mitigation(
    slug="skip-spiking-step",
    family="optimizer",
    summary="Steps above 2 times the median norm are not taken.",
    source="AXRL spike_debug (the ratio); skipping is common practice",
    after_norm=True,
)
def skip_spiking_step(ratio: float = 2.0) -> AfterNorm:
    """Nothing passes where norm > ratio * median; else the run's own clip applies.

    The batch is lost for the training. Where the median is unknown or not positive no step is
    skipped, and a norm that is not finite is always skipped.
    """
    if not ratio > 0:
        raise PatchError(f"mitigation skip-spiking-step: found ratio={ratio!r}, expected > 0")

    def answer(norms: Norms) -> float:
        known = norms.median is not None and norms.median > 0
        limit = ratio * norms.median if known and norms.median is not None else float("inf")
        taken = norms.norm <= limit and norms.norm < float("inf")
        return clipped(norms.norm, norms.clip_grad) if taken else 0.0

    return AfterNorm(answer)
