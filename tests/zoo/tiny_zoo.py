"""A recipe that takes seconds: nothing is learned, everything is run through."""

from __future__ import annotations

from replay_lib.zoo.recipe import Grpo, Recipe, Shape, Warmup

TINY = Recipe(
    shape=Shape(layers=2, hidden=16, heads=2, groups=1, channels=8, experts=4, expert_width=16),
    warmup=Warmup(rows=6, phases=((3, 4e-3),), keep_old_at=1),
    grpo=Grpo(prompts=3, rollouts=4, longest=6, steps=12, graded=True, rows_at_once=8),
)
