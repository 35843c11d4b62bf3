"""Score experts by a sigmoid instead of a softmax."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, model_patch


@mitigation(
    slug="use-sigmoid-router-scores",
    family="router",
    summary="Router probabilities by sigmoid, normalised over the chosen experts.",
    source="DeepSeek-V3, https://arxiv.org/abs/2412.19437; Megatron-Core moe_router_score_function",
    diagnostic=True,
)
def use_sigmoid_router_scores() -> Patch:
    """moe_router_score_function = sigmoid.

    Another model than the one that was trained: its norm says only how sensitive the step is to the
    gates. A diagnostic.
    """
    return model_patch(moe_router_score_function="sigmoid")
