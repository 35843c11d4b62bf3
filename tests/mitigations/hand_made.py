"""A batch written out by hand, for tests of methods: two data rows a test can reckon with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.methods import load_methods
from replay_lib.patch import Patch

METHODS = load_methods()


def make_batch(
    loss_mask: Sequence[Sequence[int]],
    *,
    advantage: object = 0.0,
    old: object = -1.0,
    rollout: object = -1.0,
    ids: object = 0,
) -> RankBatch:
    """Columns of the shape of ``loss_mask``; a single number fills the column."""
    mask_BT = torch.tensor(loss_mask, dtype=torch.bool)

    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(mask_BT.shape).contiguous()

    ids_BT = column(ids, torch.int64)
    return RankBatch(
        dp_rank=0,
        index=torch.arange(len(mask_BT)),
        input_ids=ids_BT,
        labels=ids_BT,
        loss_mask=mask_BT,
        attention_mask=torch.ones_like(mask_BT),
        advantage=column(advantage, torch.float32),
        old_logprobs=column(old, torch.float32),
        rollout_logprobs=column(rollout, torch.float32),
        ref_logprobs=column(old, torch.float32),
    )


def only_patch(slug: str, **params: object) -> Patch:
    """The one patch of a method."""
    (patch,) = METHODS[slug].patches(params)
    return patch


def on_batch(slug: str, batch: RankBatch, **params: object) -> RankBatch:
    """``batch`` after the method; what it was given must be as before."""
    before = batch.clone()
    after = only_patch(slug, **params).apply(batch)
    for name in ("loss_mask", "advantage", "old_logprobs", "rollout_logprobs"):
        same = torch.allclose(
            getattr(batch, name).float(), getattr(before, name).float(), 0, 0, equal_nan=True
        )
        assert same, f"a patch wrote into {name}"
    return after
