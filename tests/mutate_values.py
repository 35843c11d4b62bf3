"""Changes to batches of a loss and to histories of norms; see :mod:`mutate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mutate import condition

from replay_lib.batch import RankBatch


@condition("B1")
def steady_log_ratio(nats: float = 0.01, tokens: int = 4000) -> RankBatch:
    """One row where trainer and rollout engine are ``nats`` apart at every token."""
    mask = torch.ones(1, tokens, dtype=torch.bool)
    mask[:, -1] = False
    shape = mask.shape
    ids = torch.ones(shape, dtype=torch.int64)
    return RankBatch(
        dp_rank=0,
        index=torch.arange(1),
        input_ids=ids,
        labels=torch.where(mask, ids, -100),
        loss_mask=mask,
        attention_mask=torch.ones(shape, dtype=torch.bool),
        advantage=mask.float(),
        old_logprobs=torch.full(shape, -1.0),
        rollout_logprobs=torch.full(shape, -1.0 - nats),
        ref_logprobs=torch.full(shape, -1.0),
    )


@condition("C9")
def regrouped(rows: int, count: int) -> list[list[int]]:
    """``rows`` rows as ``count`` micro-batches of consecutive rows."""
    size = rows // count
    return [list(range(start, start + size)) for start in range(0, rows, size)]


@condition("C17")
def clipped_at(norm: float, bound: float) -> tuple[float, float]:
    """A norm after Megatron's clipping, and the coefficient."""
    coefficient = min(1.0, bound / (norm + 1e-6))
    return norm * coefficient, coefficient


@condition("D1")
def with_one(history: Sequence[float | None], index: int, value: Any) -> list[float | None]:
    """A history with one other entry put in at ``index``."""
    return [*history[:index], value, *history[index:]]


@condition("D2")
def with_one_at_each(history: Sequence[float | None], value: Any) -> list[list[float | None]]:
    """The same entry at each index in turn."""
    return [with_one(history, index, value) for index in range(len(history) + 1)]


@condition("D10")
def larger_advantage(factor: float) -> str:
    """A method that multiplies every advantage: an ordinary step's norm changes by as much."""
    return f"seam_examples:smaller_advantage:factor={factor}"


@condition("A13")
def forward_first(forward: Any) -> Any:
    """A forward-only pass (no gradient, its own routes) before each training pass."""

    def twice(model: Any, micro: Any, routes: Any, *rest: Any, **options: Any) -> Any:
        with torch.no_grad():
            forward(model, micro, None, *rest, **options)
        return forward(model, micro, routes, *rest, **options)

    return twice
