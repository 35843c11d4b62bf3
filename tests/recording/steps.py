"""Batches of a small run and its loss: what a training loop around a recorder needs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from replay_lib.loss import GrpoSettings, log_prob_and_entropy, micro_batch_loss
from replay_lib.recording.columns import rank_batch

SETTINGS = GrpoSettings()
STEPS, SPIKE = 12, 11  # the last one: after the detector's ten steps of warming up
ROWS, WIDTH = 5, 12


def batches(dp_rank: int, vocabulary: int, routes: tuple[int, int, int] | None) -> list[dict]:
    """A rank's batch of each step; the last step's advantages are thirty times as large."""
    return [_batch(step, dp_rank, vocabulary, routes) for step in range(STEPS)]


def _batch(
    step: int, dp_rank: int, vocabulary: int, routes: tuple[int, int, int] | None
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1000 * dp_rank + step)
    lengths = torch.randint(4, WIDTH + 1, (ROWS,), generator=g)
    at = torch.arange(WIDTH)[None]
    attention, loss = at < lengths[:, None], (at >= 1) & (at < lengths[:, None] - 1)
    advantage = torch.randn(ROWS, 1, generator=g) * loss * (30.0 if step == SPIKE else 1.0)
    ids = torch.randint(1, vocabulary, (ROWS, WIDTH), generator=g) * attention
    old = torch.full((ROWS, WIDTH), -math.log(vocabulary)) * attention
    batch: dict[str, Any] = {
        "input_ids": ids,
        "loss_mask": loss,
        "attention_mask": attention,
        "advantage": advantage,
        "old_logprobs": old,
        "rollout_logprobs": old + 0.05 * torch.randn(ROWS, WIDTH, generator=g) * attention,
        "ref_logprobs": old,
        "reward": advantage[:, 1],
    }
    if routes is not None:
        layers, topk, experts = routes
        draw = torch.rand(ROWS, WIDTH, layers, experts, generator=g).argsort(dim=3)
        chosen = draw[..., :topk].to(torch.int16)
        batch["routes"] = [chosen[i, : n - 1] for i, n in enumerate(lengths.tolist())]
    return batch


def backward(model: Any, batch: dict[str, Any], micro_batch_size: int, ranks: int) -> None:
    """Gradients of one step of a model that gives logits: summed, divided once by what counts."""
    whole = rank_batch(batch, 0)
    losses, count = [], torch.zeros(())
    for start in range(0, whole.rows, micro_batch_size):
        rows = whole.select(range(start, min(start + micro_batch_size, whole.rows)))
        log_prob, entropy = (
            value.view_as(rows.input_ids) * rows.attention_mask
            for value in log_prob_and_entropy(
                model(rows.input_ids).flatten(0, 1), rows.labels.flatten(), SETTINGS
            )
        )
        made = micro_batch_loss(SETTINGS, rows, log_prob, entropy)
        losses.append(made.scaled)
        count += float(made.denominator)
    if ranks > 1:
        dist.all_reduce(count)
    total: Tensor = torch.stack(losses).sum()
    (total * ranks / count).backward()  # DistributedDataParallel divides by the ranks
