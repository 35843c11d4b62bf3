"""A recipe that takes seconds: nothing is learned, everything is run through."""

from __future__ import annotations

import random

import torch

from replay_lib.batch import RankBatch
from replay_lib.zoo.recipe import Grpo, Recipe, Shape, Warmup
from replay_lib.zoo.rollouts import Rollouts, group_advantages, make_batch
from replay_lib.zoo.sampler import Sampler
from replay_lib.zoo.task import Problem, encode, make_problem

TINY = Recipe(
    shape=Shape(layers=2, hidden=16, heads=2, groups=1, channels=8, experts=4, expert_width=16),
    warmup=Warmup(rows=6, longest=3),
    grpo=Grpo(prompts=3, rollouts=4, longest=6, steps=12, graded=True, rows_at_once=8),
)


def tiny_weights(seed: int = 0, shape: Shape = TINY.shape) -> dict[str, torch.Tensor]:
    """Random weights under checkpoint keys, layers and experts stacked."""
    generator = torch.Generator().manual_seed(seed)
    hidden, channels, layers = shape.hidden, shape.channels, shape.layers
    rows = (shape.heads + 2 * shape.groups) * channels
    sizes = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.weight": (rows, hidden),
        "self_attention.linear_proj.weight": (hidden, shape.heads * channels),
        "self_attention.q_layernorm.weight": (channels,),
        "self_attention.k_layernorm.weight": (channels,),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.router.weight": (shape.experts, hidden),
        "mlp.experts.experts.linear_fc1.weight": (shape.experts, 2 * shape.expert_width, hidden),
        "mlp.experts.experts.linear_fc2.weight": (shape.experts, hidden, shape.expert_width),
    }
    drawn = {
        f"decoder.layers.{name}": torch.randn(layers, *size, generator=generator) * 0.4
        for name, size in sizes.items()
    }
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        drawn[name] = torch.randn(shape.vocabulary, hidden, generator=generator) * 0.4
    drawn["decoder.final_layernorm.weight"] = torch.ones(hidden)
    return {k: v.abs() + 0.5 if "norm" in k else v for k, v in drawn.items()}


class FakeRun:
    """What an arrangement asks of a run, without a trainer behind it."""

    def __init__(self) -> None:
        self.recipe = TINY
        self.recent = [tiny_weights(seed) for seed in range(9)]
        self.old = tiny_weights(99)
        self.baseline = 0.8
        self.step = 12
        self.asked: list[object] = []  # ages of the rollout engines used; "given" for others

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"fake/{purpose}")

    def sampler(self, age: int | None = None, weights: dict | None = None) -> Sampler:
        self.asked.append("given" if weights is not None else 1 if age is None else age)
        given = self.recent[-1 - (1 if age is None else age)] if weights is None else weights
        return Sampler(TINY.shape, given)

    def problems(self) -> tuple[Problem, ...]:
        return tuple(make_problem(self.rng(f"problem {n}")) for n in range(TINY.grpo.prompts))

    def roll(self, sampler, problems=None, unstopped=frozenset(), unstopped_longest=0) -> Rollouts:
        asked = self.problems() if problems is None else tuple(problems)
        sampled = sampler.sample(
            [encode(p.prompt) for p in asked],
            TINY.grpo.rollouts,
            TINY.grpo.longest,
            torch.Generator().manual_seed(5),
            unstopped=unstopped,
            unstopped_longest=unstopped_longest,
        )
        return Rollouts(asked, TINY.grpo.rollouts, tuple(sampled), graded=True)

    def ordinary(self, rollouts: Rollouts) -> RankBatch:
        score_B = rollouts.scores()
        return make_batch(rollouts, score_B, group_advantages(score_B, rollouts.copies))
