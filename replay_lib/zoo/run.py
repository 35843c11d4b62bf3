"""A run in memory: the trainer, the weights of recent steps, and what a step needs of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from replay_lib.batch import RankBatch
from replay_lib.errors import UsageError
from replay_lib.loss import GrpoSettings
from replay_lib.recorder import Observation, SpikeRecorder
from replay_lib.zoo.content import step_content
from replay_lib.zoo.model import Weights, load_whole, whole_tensors
from replay_lib.zoo.recipe import Recipe
from replay_lib.zoo.rollouts import Rollouts, group_advantages, make_batch
from replay_lib.zoo.sampler import Sampler
from replay_lib.zoo.task import Problem, encode, make_problem
from replay_lib.zoo.trainer import Gradient, Trainer


@dataclass
class Run:
    """``recent`` are whole weights, the present ones last; ``norms`` and ``scores`` (mean score a
    step) are of the quiet steps so far; ``step`` is the next one."""

    recipe: Recipe
    seed: int
    trainer: Trainer
    old: Weights
    recent: list[Weights] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    step: int = 0

    @property
    def baseline(self) -> float:
        """Mean score of the last ten steps: one baseline for all prompts."""
        last = self.scores[-10:]
        return sum(last) / len(last)

    def rng(self, purpose: str) -> random.Random:
        """Draws of this step and purpose alone: they do not depend on what was drawn before."""
        return random.Random(f"{self.seed}/{self.step}/{purpose}")

    def sampler(self, age: int | None = None, weights: Weights | None = None) -> Sampler:
        """A rollout engine with ``weights``, or with those of ``age`` steps ago (younger where the
        run is younger)."""
        if weights is None:
            back = self.recipe.grpo.stale if age is None else age
            if back > self.recipe.grpo.kept:
                raise UsageError(
                    f"zoo: this recipe keeps the weights of {self.recipe.grpo.kept} steps; "
                    f"rollouts {back} steps old need a recipe that keeps more (tiny does)"
                )
            weights = self.recent[max(len(self.recent) - 1 - back, 0)]
        return Sampler(self.recipe.shape, weights)

    def problems(self) -> tuple[Problem, ...]:
        """The prompts of this step."""
        rng = self.rng("problems")
        return tuple(make_problem(rng) for _ in range(self.recipe.grpo.prompts))

    def roll(
        self,
        sampler: Sampler,
        problems: Sequence[Problem] | None = None,
        unstopped: frozenset[int] = frozenset(),
        unstopped_longest: int = 0,
    ) -> Rollouts:
        """Responses to this step's prompts (or to ``problems``)."""
        asked = self.problems() if problems is None else tuple(problems)
        generator = torch.Generator().manual_seed(self.rng("tokens").getrandbits(60))
        copies = self.recipe.grpo.rollouts
        sampled = sampler.sample(
            [encode(p.prompt) for p in asked],
            copies,
            self.recipe.grpo.longest,
            generator,
            unstopped=unstopped,
            unstopped_longest=unstopped_longest,
        )
        return Rollouts(asked, copies, tuple(sampled), self.recipe.grpo.graded)

    def ordinary(self, rollouts: Rollouts) -> RankBatch:
        """The batch with AXRL's group-normalised advantages."""
        score_B = rollouts.scores()
        return make_batch(rollouts, score_B, group_advantages(score_B, rollouts.copies))

    def observe(
        self, recorder: SpikeRecorder, batch: RankBatch, settings: GrpoSettings
    ) -> tuple[Gradient, Observation, Any]:
        """The step's gradient, seen by ``recorder`` before any update, and its content's maker."""
        gradient = self.trainer.policy_gradient(batch, settings)

        def content(median: float | None) -> Any:
            return step_content(
                self.recipe,
                step=self.step,
                seed=self.seed,
                gradient=gradient,
                median=median,
                weights=self.recent[-1],
                settings=settings,
                spike=recorder.spike,
            )

        return gradient, recorder.observe(self.step, gradient.norm, content), content

    def advance(self, gradient: Gradient, score: float, learning_rate: float) -> None:
        """Update the weights and go to the next step."""
        self.trainer.update(gradient.norm, learning_rate, self.recipe.grpo.betas)
        self.recent = [*self.recent, whole_tensors(self.trainer.model)][
            -self.recipe.grpo.kept - 1 :
        ]
        self.norms.append(gradient.norm)
        self.scores.append(score)
        self.step += 1

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, as tensors and plain values."""
        return {
            "old": self.old,
            "recent": list(self.recent),
            "norms": list(self.norms),
            "scores": list(self.scores),
            "step": self.step,
            "adam_mean": self.trainer.adam.mean.clone(),
            "adam_square": self.trainer.adam.square.clone(),
            "adam_steps": self.trainer.adam.steps,
            "adam_master": {k: w.clone() for k, w in self.trainer.adam.master.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to ``state``; what is computed from there on is bit-equal."""
        self.old, self.step = state["old"], state["step"]
        self.recent = list(state["recent"])
        self.norms, self.scores = list(state["norms"]), list(state["scores"])
        adam = self.trainer.adam
        adam.mean.copy_(state["adam_mean"])
        adam.square.copy_(state["adam_square"])
        adam.steps = state["adam_steps"]
        adam.master = {k: w.clone() for k, w in state["adam_master"].items()}
        load_whole(self.trainer.model, self.recent[-1])
