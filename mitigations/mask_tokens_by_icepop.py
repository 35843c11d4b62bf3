"""Drop the policy term of tokens on which trainer and rollout engine disagree."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="mask-tokens-by-icepop",
    family="masking",
    summary="Policy term only of tokens whose old/rollout probability ratio lies within bounds.",
    source="IcePop, https://hijkzzz.notion.site/online-ice-pop; AXRL icepop_masking_low and _high",
)
def mask_tokens_by_icepop(low: float = 0.5, high: float = 2.0) -> Patch:
    """Switch IcePop's token mask on.

    policy_loss[t] *= 1 if low <= exp(old[t] - rollout[t]) <= high else 0, on loss tokens.
    Denominators, KL and entropy go on counting every loss token.

    Limits: needs rollout log-probabilities. Coherent spikes have no outlying tokens to drop.
    """
    if not 0 <= low < high:
        raise PatchError(
            f"mitigation mask-tokens-by-icepop: found low={low!r}, high={high!r}, "
            "expected 0 <= low < high"
        )
    return settings_patch(icepop_masking_low=float(low), icepop_masking_high=float(high))
