"""Compute router scores in float64."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, model_patch


@mitigation(
    slug="compute-router-in-float64",
    family="router",
    summary="Router scores and probabilities in float64.",
    source="Megatron-Core moe_router_dtype",
)
def compute_router_in_float64() -> Patch:
    """moe_router_dtype = fp64.

    It tells whether rounding in the router is at fault: in bfloat16 runs scores of near-ties differ
    between rollout engine and trainer.
    """
    return model_patch(moe_router_dtype="fp64")
