"""Scale negative advantages until their sum equals that of the positive ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, batch_patch, mitigation

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch


@mitigation(
    slug="balance-negative-advantages",
    family="advantage",
    summary="Negative advantages scaled down to the positive ones' sum on each data-parallel rank.",
    source="XYZ-AI-Lab/axrl, spike-mitigation-methods/balance-negative-advantages.md",
)
def balance_negative_advantages(eps: float = 1e-6, scale_up: bool = False) -> Patch:
    """Balance the signs of one recorded data-parallel rank's advantages.

    P = sum of a over loss tokens with a > eps; N = sum of -a over loss tokens with a < -eps;
    a' = a * s wherever a < -eps (masked positions too), s = min(1, P / N). Nothing changes where P
    or N is zero. Sums and scaling are taken in the advantages' dtype (float32).

    The source's text says to scale down, but its code has no bound: where positive advantages
    dominate it scales negative ones up. ``scale_up=True`` gives that, s = P / N.

    Limits: it may pass by deleting the signal, which the retained shares then show.
    """
    if not eps >= 0:
        raise PatchError(
            f"mitigation balance-negative-advantages: found eps={eps!r}, expected >= 0"
        )

    def apply(batch: RankBatch) -> RankBatch:
        balanced_BT = _balance(batch.advantage, batch.loss_mask.bool(), eps, scale_up)
        return batch.replace(advantage=balanced_BT)

    return batch_patch(apply)


def _balance(advantage_BT: Tensor, mask_BT: Tensor, eps: float, scale_up: bool) -> Tensor:
    trainable = advantage_BT[mask_BT]
    positive = trainable[trainable > eps].sum()
    negative = -trainable[trainable < -eps].sum()
    if not (bool(positive > 0) and bool(negative > 0)):
        return advantage_BT
    scale = positive / negative
    if not scale_up and bool(scale >= 1):
        return advantage_BT
    return (advantage_BT * scale).where(advantage_BT < -eps, advantage_BT)
