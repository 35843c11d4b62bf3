"""Supervised warm-up: the model learns the task before the reinforcement learning starts."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from replay_lib.batch import RankBatch
from replay_lib.zoo.model import Weights, whole_tensors
from replay_lib.zoo.recipe import Recipe
from replay_lib.zoo.rollouts import token_batch
from replay_lib.zoo.task import encode, make_problem
from replay_lib.zoo.trainer import Trainer

#: Adam's second beta is shorter here: the first steps are steep.
BETAS = (0.9, 0.95)
RISE = 20  # steps in which the learning rate rises to its value


def warm_up(trainer: Trainer, recipe: Recipe, seed: int, tell: Callable[[str], None]) -> Weights:
    """Train in place; returns the weights of step ``keep_old_at`` (the much older policy)."""
    old: Weights = {}
    step = 0
    for steps, rate in recipe.warmup.phases:
        for _ in range(steps):
            batch = supervised_batch(recipe.warmup.rows, random.Random(f"{seed}/warm-up/{step}"))
            norm = trainer.supervised_gradient(batch)
            trainer.update(norm, rate * min(1.0, (step + 1) / RISE), BETAS)
            step += 1
            if step == recipe.warmup.keep_old_at:
                old = whole_tensors(trainer.model)
            if step % 50 == 0:
                tell(f"warm-up step {step}: gradient norm {norm:.3f}")
    return old or whole_tensors(trainer.model)


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
