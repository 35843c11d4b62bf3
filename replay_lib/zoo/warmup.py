"""Supervised warm-up: the model learns the task before the reinforcement learning starts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from replay_lib.batch import RankBatch
from replay_lib.zoo.model import Weights, whole_tensors
from replay_lib.zoo.recipe import Recipe, Warmup
from replay_lib.zoo.rollouts import token_batch
from replay_lib.zoo.task import encode, make_problem
from replay_lib.zoo.trainer import Trainer


def warm_up(trainer: Trainer, recipe: Recipe, seed: int, tell: Callable[[str], None]) -> Weights:
    """Train in place; returns the weights of the first step under ``old_under`` (else the last).

    Weights of step n are those after n updates.
    """
    warmup = recipe.warmup
    old: Weights = {}
    losses: deque[float] = deque(maxlen=warmup.window)
    decaying = 0
    for step in range(1, warmup.longest + 1):
        batch = supervised_batch(warmup.rows, random.Random(f"{seed}/warm-up/{step}"))
        norm, loss = trainer.supervised_gradient(batch)
        losses.append(loss)
        mean = sum(losses) / len(losses)
        decaying += bool(decaying) or mean < warmup.decay_under
        trainer.update(norm, warmup.learning_rate * _share(warmup, step, decaying), warmup.betas)
        if not old and mean < warmup.old_under:
            old = whole_tensors(trainer.model)
        if step % 50 == 0:
            tell(f"warm-up step {step}: loss {mean:.4f}")
        if mean < warmup.end_under:
            tell(f"warm-up ended after {step} steps with loss {mean:.4f}")
            break
    return old or whole_tensors(trainer.model)


def _share(warmup: Warmup, step: int, decaying: int) -> float:
    """Of the learning rate: a linear rise, a plateau, a linear fall to a tenth."""
    return min(1.0, step / warmup.rise) * max(0.1, 1.0 - 0.9 * decaying / warmup.decay)


def supervised_batch(rows: int, rng: random.Random) -> RankBatch:
    """Solved problems; what trains is the response and, in the worked example, its solution."""
    problems = [make_problem(rng) for _ in range(rows)]
    texts = [encode(p.prompt + p.answer) for p in problems]
    starts = torch.tensor([len(p.prompt) for p in problems])
    batch = token_batch(texts, starts, torch.zeros(rows))
    shown = torch.zeros_like(batch.loss_mask)
    for row, problem in enumerate(problems):
        first = problem.prompt.index("=")  # the example's question ends here
        shown[row, first : problem.prompt.index(".")] = True
    ids = batch.input_ids
    following = torch.cat([ids[:, 1:], torch.zeros(rows, 1, dtype=ids.dtype)], dim=1)
    mask = batch.loss_mask | shown
    return batch.replace(loss_mask=mask, labels=torch.where(mask, following, -100))
