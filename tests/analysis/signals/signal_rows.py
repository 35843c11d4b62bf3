"""Batches written by hand, row by row, for figures that can be reckoned on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.analysis.signals.view import View, view_of
from replay_lib.batch import RankBatch


@dataclass(frozen=True, kw_only=True)
class Row:
    """``tokens`` are real ones; the last ``trained`` of them train.

    ``old``, ``rollout`` and ``ref`` have a value a trained token, or one for all.
    """

    tokens: Sequence[int]
    trained: int
    advantage: float | Sequence[float] = 0.0
    old: float | Sequence[float] = -1.0
    rollout: float | Sequence[float] = -1.0
    ref: float | Sequence[float] = -1.0
    turns: int | Sequence[int] = 0
    reward: float = 0.0
    baseline: float = 0.0
    index: int = 0
    trajectory: int = 0


def batch_of(rows: Sequence[Row], dp_rank: int = 0, width: int = 16) -> RankBatch:
    """The rows, label-aligned as a trainer writes them: what belongs to token t + 1 is at t."""
    size = (len(rows), width)
    ids, labels = torch.zeros(size, dtype=torch.int64), torch.full(size, -100)
    mask, real = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    for number, row in enumerate(rows):
        length = len(row.tokens)
        ids[number, :length] = torch.tensor(row.tokens)
        real[number, :length] = True
        mask[number, length - 1 - row.trained : length - 1] = True
        labels[number, :-1][mask[number, :-1]] = ids[number, 1:][mask[number, :-1]]

    def floats(name: str) -> Tensor:
        values = torch.zeros(size)
        for number, row in enumerate(rows):
            given = getattr(row, name)
            values[number][mask[number]] = torch.as_tensor(given, dtype=torch.float32)
        return values

    turns = torch.full(size, -1)
    for number, row in enumerate(rows):
        turns[number][mask[number]] = torch.as_tensor(row.turns)
    return RankBatch(
        dp_rank=dp_rank,
        index=torch.tensor([row.index for row in rows]),
        input_ids=ids,
        labels=labels,
        loss_mask=mask,
        attention_mask=real,
        advantage=floats("advantage"),
        old_logprobs=floats("old"),
        rollout_logprobs=floats("rollout"),
        ref_logprobs=floats("ref"),
        turn_index=turns,
        trajectory_id=torch.tensor([row.trajectory for row in rows]),
        reward=torch.tensor([row.reward for row in rows]),
        reward_baseline=torch.tensor([row.baseline for row in rows]),
    )


def view_of_rows(rows: Sequence[Row], dp_rank: int = 0) -> View:
    return view_of(batch_of(rows, dp_rank))
