"""Clip the whole gradient at one norm."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import AfterNorm, clipped, mitigation


@mitigation(
    slug="clip-global-norm",
    family="optimizer",
    summary="The optimizer sees the gradient scaled to a norm of at most 1.",
    source="Megatron-Core clip_grad",
    after_norm=True,
)
def clip_global_norm(max_norm: float = 1.0) -> AfterNorm:
    """Scale the gradient by min(1, max_norm / (norm + 1e-6)), as Megatron clips.

    It bounds what the optimizer sees and leaves the direction, so what is wrong with the step
    still enters the weights. For comparison: it acts after the cause.
    """
    if not max_norm > 0:
        raise PatchError(f"mitigation clip-global-norm: found max_norm={max_norm!r}, expected > 0")
    return AfterNorm(lambda norms: clipped(norms.norm, max_norm))
