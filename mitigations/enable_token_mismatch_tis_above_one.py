"""Weight up tokens that the trainer finds more probable than the rollout engine did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, token_weights_patch

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="enable-token-mismatch-tis-above-one",
    family="settings",
    summary="Importance weight old/rollout on the policy loss, at least 1 and at most 2.",
    source="XYZ-AI-Lab/axrl, spike-mitigation-methods/enable-token-mismatch-tis-max2.md",
)
def enable_token_mismatch_tis_above_one(clip_max: float = 2.0) -> Patch:
    """Weight up tokens that the trainer finds more probable than the rollout engine did.

    One-sided token importance sampling: weight = min(max(exp(old - rollout), 1), clip_max).

    The other half of the published study of TIS. The trainer has no such setting: it is a weight
    on the policy loss, without gradient, denominators as they are.
    """
    if not clip_max >= 1:
        raise PatchError(
            f"mitigation enable-token-mismatch-tis-above-one: found clip_max={clip_max!r}, "
            "expected >= 1"
        )

    def apply(weight_BT: Tensor, rows: RankBatch, logprob_BT: Tensor) -> Tensor:
        from replay_lib.loss.ratios import token_ratio

        ratio_BT = token_ratio(rows.column("old_logprobs"), rows.column("rollout_logprobs"))
        return weight_BT * ratio_BT.clamp(1.0, clip_max)

    return token_weights_patch(apply)
