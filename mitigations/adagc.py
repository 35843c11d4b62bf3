"""Clip each parameter's gradient by its own recent norm."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import AfterNorm, Norms, mitigation


@mitigation(
    slug="adagc",
    family="optimizer",
    summary="Each parameter's gradient at most 1.05 times its norm in an ordinary step.",
    source="AdaGC, https://arxiv.org/abs/2502.11034",
    after_norm=True,
)
def adagc(factor: float = 1.05) -> AfterNorm:
    """AdaGC: each parameter's norm is at most ``factor`` times its own recent norm.

    The method keeps a running mean of each parameter's norm. A snapshot has none, so the norms of
    the case's quiet control, an ordinary step of the same run, stand for it. Parameters that the
    quiet step did not move pass nothing.
    """
    if not factor > 0:
        raise PatchError(f"mitigation adagc: found factor={factor!r}, expected > 0")

    def answer(norms: Norms) -> float | None:
        quiet = norms.quiet_param_norms
        if quiet is None:
            return None  # no ordinary step to compare with
        bounded = (min(norm, factor * quiet[name]) for name, norm in norms.param_norms.items())
        # the parts were measured before any answer that came earlier
        part = float(sum(norm**2 for norm in bounded) ** 0.5)
        return min(part, norms.norm)

    return AfterNorm(answer)
