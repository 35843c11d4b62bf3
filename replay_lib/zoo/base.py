"""The base run of a seed, warm-up and quiet steps, made once and kept in a cache directory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from replay_lib import layout
from replay_lib.engine.versions import versions
from replay_lib.recorder import Event, SpikeRecorder
from replay_lib.snapshot.write import whole_directory
from replay_lib.zoo.arrange import plain
from replay_lib.zoo.losses import ORDINARY
from replay_lib.zoo.model import initialise, load_whole, new_model, whole_tensors
from replay_lib.zoo.recipe import Recipe
from replay_lib.zoo.run import Run
from replay_lib.zoo.trainer import Trainer
from replay_lib.zoo.warmup import warm_up

Tell = Callable[[str], None]
STATE = "state.pt"


def base_run(recipe: Recipe, seed: int, cache: Path, tell: Tell) -> tuple[Run, Path]:
    """The run at the end of its quiet steps, and the directory that holds its quiet snapshot."""
    torch.manual_seed(seed)  # nothing draws from it; a stray draw must not vary either
    run = _empty(recipe, seed)
    home = cache / f"base-{recipe.key(seed, versions())}"
    if not (home / STATE).is_file():
        shutil.rmtree(home, ignore_errors=True)
        with whole_directory(home) as part:
            _make(run, part, tell)
            torch.save(run.state(), part / STATE)
    run.restore(torch.load(home / STATE, weights_only=True, map_location=recipe.device))
    return run, home


def _empty(recipe: Recipe, seed: int) -> Run:
    model = new_model(recipe.shape, torch.device(recipe.device), recipe.precision)
    initialise(model, seed)
    return Run(recipe=recipe, seed=seed, trainer=Trainer(model, recipe.grpo), old={})


def _make(run: Run, home: Path, tell: Tell) -> None:
    start = time.perf_counter()
    run.old = warm_up(run.trainer, run.recipe, run.seed, tell)
    tell(f"warm-up took {time.perf_counter() - start:.0f} s")
    run.trainer = Trainer(_moved(run), run.recipe.grpo)  # Adam starts afresh
    run.recent = [whole_tensors(run.trainer.model)]
    recorder = SpikeRecorder(home, quiet_every=10, raise_failures=True)
    for _ in range(run.recipe.grpo.steps):
        batch = plain(run)
        gradient, seen, _ = run.observe(recorder, batch, ORDINARY)
        score = float(batch.column("reward").mean())
        told = f"step {run.step}: score {score:.3f}, norm {gradient.norm:.4f}"
        tell(told + (f", {seen.event}" if seen.event is not Event.ORDINARY else ""))
        run.advance(gradient, score, run.recipe.grpo.learning_rate)
    tell(f"base run took {time.perf_counter() - start:.0f} s")


def _moved(run: Run) -> Any:
    """The warmed-up model in a new module: the old one's gradient hooks stay behind."""
    weights = whole_tensors(run.trainer.model)
    recipe = run.recipe
    model = new_model(recipe.shape, torch.device(recipe.device), recipe.precision)
    load_whole(model, weights)
    return model


def quiet_of(home: Path) -> Path | None:
    """The quiet snapshot of a base run, or None where no step was near the median."""
    kept = sorted((home / layout.QUIET_ROOT).glob("iter_*"))
    return kept[-1] if kept else None
