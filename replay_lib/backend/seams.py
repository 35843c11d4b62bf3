"""Which patches a replay directory can express; the others are refused by name.

A directory holds a batch, loss settings and routes. AXRL forces saved routes at all tokens, at loss
tokens alone (a field of its worker's configuration), or, where the batch names none, nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.errors import PatchError
from replay_lib.patch import Patch, Seam

Routes = Literal["all", "loss tokens", "none"]

EXPRESSED = frozenset({Seam.BATCH, Seam.SETTINGS, Seam.ROUTING})
#: Why each of the others is not.
_REASONS = {
    Seam.WEIGHTS: "the checkpoint is linked as it is",
    Seam.MODEL: "it has no fields of the live model",
    Seam.TOKEN_WEIGHTS: "AXRL's loss takes no weight a token from a file",
}


def refuse_unexpressible(name: str, patches: Sequence[Patch]) -> None:
    """PatchError that names experiment ``name`` and the seams that cannot be expressed."""
    refused = [seam for seam in Seam if seam in {p.seam for p in patches} - EXPRESSED]
    if refused:
        told = "; ".join(
            f"{seam.value} ({_REASONS.get(seam, 'AXRL reads it from nowhere')})" for seam in refused
        )
        raise PatchError(
            f"backend axrl: {name} acts at a seam that a replay directory cannot express: {told}. "
            "Replay it with --backend native"
        )


def routes_of(name: str, batches: Sequence[RankBatch], forced: Sequence[Tensor | None]) -> Routes:
    """What the masks ``forced`` (bool ``[B, T, L]`` a rank) say in AXRL's terms; PatchError else.

    Only real tokens count: padding is forced wherever all of them are.
    """
    masks = [mask for mask in forced if mask is not None]
    if not masks:
        return "none"
    real = [batch.attention_mask[:, :, None].expand_as(m) for batch, m in _pairs(batches, forced)]
    loss = [batch.loss_mask[:, :, None].expand_as(m) for batch, m in _pairs(batches, forced)]
    pairs = list(zip(masks, real, strict=True))
    if all(bool((mask | ~there).all()) for mask, there in pairs):
        return "all"
    if not any(bool((mask & there).any()) for mask, there in pairs):
        return "none"
    if all(bool(((m == t) | ~r).all()) for (m, r), t in zip(pairs, loss, strict=True)):
        return "loss tokens"
    raise PatchError(
        f"backend axrl: {name} forces saved routes in some layers or at tokens of its own choice; "
        "AXRL forces them at all tokens, at loss tokens, or nowhere. Replay it with --backend "
        "native"
    )


def _pairs(
    batches: Sequence[RankBatch], forced: Sequence[Tensor | None]
) -> list[tuple[RankBatch, Tensor]]:
    return [(b, m) for b, m in zip(batches, forced, strict=True) if m is not None]
