"""Which methods of a combination changed nothing: what each patch was given beside what it gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.loss import GrpoSettings
from replay_lib.patch import Patch, Seam


def watched(patches: Sequence[Patch], label: str, moved: set[str]) -> list[Patch]:
    """The same patches; ``label`` gets into ``moved`` once one of them changes what it is given.

    A change where nothing reads it does not count: routes of padding, weights of tokens that do
    not train. What is no value of its seam counts, since its own check refuses it.
    """
    return [_watched(patch, label, moved) for patch in patches]


def _watched(patch: Patch, label: str, moved: set[str]) -> Patch:
    def apply(present: Any, *beside: Any) -> Any:
        before = _copied(present)  # a patch may write into what it gets
        after = patch.apply(present, *beside)
        if label not in moved and _differs(patch.seam, before, after, beside):
            moved.add(label)
        return after

    return Patch(patch.seam, apply)


def _copied(present: Any) -> Any:
    if isinstance(present, Mapping):
        return {name: v.clone() if isinstance(v, Tensor) else v for name, v in present.items()}
    return present.clone() if isinstance(present, (Tensor, RankBatch)) else present


def _differs(seam: Seam, before: Any, after: Any, beside: Sequence[Any]) -> bool:
    if type(after) is not type(before):
        return True
    if isinstance(before, Mapping):  # of parameters or fields: what is absent stays
        return any(k not in before or not _equal(before[k], value) for k, value in after.items())
    if isinstance(before, GrpoSettings):
        return bool(before.model_dump() != after.model_dump())
    if isinstance(before, RankBatch):
        names = TOKEN_COLUMNS + ROW_COLUMNS
        return any(not _equal(getattr(before, name), getattr(after, name)) for name in names)
    if not isinstance(before, Tensor):
        return bool(before != after)
    read: Tensor | bool = True  # a router patch is given real tokens alone
    if seam is not Seam.ROUTER:
        rows = beside[0]
        read = rows.attention_mask[..., None] if seam is Seam.ROUTING else rows.loss_mask
    return before.shape != after.shape or bool(((before != after) & read).any())


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one is other or (type(one) is type(other) and one == other))
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    same = one == other
    return bool((same | (one.isnan() & other.isnan()) if one.is_floating_point() else same).all())
