"""Small batches for tests of the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import RankBatch

COLUMNS = ("advantage", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")


def make_rows(loss_mask: Any, **columns: Any) -> RankBatch:
    """Rows with this loss mask; advantage 1 and all log-probabilities -1 unless given."""
    mask = torch.as_tensor(loss_mask, dtype=torch.bool)
    given: dict[str, Any] = dict.fromkeys(COLUMNS[:4], -1.0) | {"advantage": 1.0} | columns
    for name in COLUMNS:
        value = given.get(name)
        if value is not None and not isinstance(value, Tensor):
            given[name] = torch.as_tensor(value, dtype=torch.float32).expand(mask.shape).clone()
    given.setdefault("labels", torch.zeros(mask.shape, dtype=torch.int64))
    return RankBatch(
        dp_rank=0,
        index=torch.arange(len(mask)),
        input_ids=torch.zeros(mask.shape, dtype=torch.int64),
        loss_mask=mask,
        attention_mask=torch.ones_like(mask),
        **given,
    )


def random_rows(seed: int, rows: int = 3, width: int = 6) -> tuple[RankBatch, Tensor, Tensor]:
    """Rows, current log-probabilities and entropies, with some tokens off the loss mask."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, width)
    old = -torch.rand(shape, generator=g) * 3

    def near() -> Tensor:
        return old + 0.3 * torch.randn(shape, generator=g)

    mask = torch.rand(shape, generator=g) < 0.7
    mask[:, 0] = True
    batch = make_rows(
        mask,
        advantage=torch.randn(shape, generator=g),
        old_logprobs=old,
        rollout_logprobs=near(),
        ref_logprobs=near(),
        turn_index=torch.where(mask, torch.arange(width) // 2, -1),
    )
    return batch, near(), torch.rand(shape, generator=g)
