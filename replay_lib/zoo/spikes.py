"""Spikes from a base run: the arranged ones are its next step, the natural one takes a while."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.engine.versions import versions
from replay_lib.recorder import Event, Observation, SpikeRecorder
from replay_lib.snapshot import SpikeSettings, write_snapshot
from replay_lib.zoo.arrange import arrange
from replay_lib.zoo.base import base_run, quiet_of
from replay_lib.zoo.kinds import NATURAL, REPORT, find_kind
from replay_lib.zoo.losses import UNCLIPPED
from replay_lib.zoo.recipe import Recipe
from replay_lib.zoo.run import Run

Tell = Callable[[str], None]

NATURAL_STEPS = 30
NATURAL_RATE = 2e-4
NATURAL_AGE = 8


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a kind came to: ``snapshot`` and ``quiet`` are relative to the directory asked for.

    ``event``: ``spike`` where the detector saw one; ``ratio`` is None where the median is 0 (a run
    that learnt nothing). ``norms`` are those of the run's steps before.
    """

    kind: str
    seed: int
    step: int
    norm: float
    median: float | None
    ratio: float | None
    event: str
    snapshot: str | None
    quiet: str | None
    accuracy: float
    norms: list[float]
    versions: dict[str, str]


def make_kinds(request: dict[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """Make every kind of ``request`` (``recipe``, ``seed``, ``cache``, ``kinds``: name to
    directory), each from the same state of the base run."""
    recipe = Recipe.model_validate(request["recipe"])
    run, home = base_run(recipe, request["seed"], Path(request["cache"]), tell)
    state = run.state()
    made = []
    for kind, directory in request["kinds"].items():
        run.restore(state)
        result = asdict(_make(kind, run, home, Path(directory)))
        report = Path(directory) / REPORT
        report.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        tell(f"{kind} seed {run.seed}: norm / median {result['ratio']}, {result['event']}")
        made.append(result)
    return made


def _make(kind: str, run: Run, home: Path, directory: Path) -> Made:
    find_kind(kind)
    directory.mkdir(parents=True, exist_ok=True)
    spike = SpikeSettings(enabled=True, save_per_param_grads=False)
    recorder = SpikeRecorder(directory, spike=spike, history=run.norms, raise_failures=True)
    accuracy = run.baseline
    before = list(run.norms)
    natural = kind == NATURAL
    seen = _natural(run, recorder) if natural else _arranged(kind, run, recorder, directory)
    quiet = _quiet(recorder, home, directory)
    assert seen.norm is not None
    return Made(
        kind=kind,
        seed=run.seed,
        step=seen.step,
        norm=seen.norm,
        median=seen.median,
        ratio=seen.ratio,
        event=str(seen.event),
        snapshot=_inside(seen.path, directory),
        quiet=_inside(quiet, directory),
        accuracy=accuracy,
        norms=before + run.norms[len(before) :],
        versions=versions(),
    )


def _arranged(kind: str, run: Run, recorder: SpikeRecorder, directory: Path) -> Observation:
    """One step with the cause; where it is no spike it is written beside the spikes."""
    batch, settings = arrange(kind, run)
    _, seen, content = run.observe(recorder, batch, settings)
    if seen.event is Event.SPIKE:
        return seen
    path = directory / layout.OTHER_ROOT / layout.iter_dir(run.step)
    write_snapshot(path, content(seen.median))
    return _at(seen, path)


def _natural(run: Run, recorder: SpikeRecorder) -> Observation:
    """Stale rollouts until the detector sees the first spike; the largest step where it sees none.

    The ratio is to the rollout engine's log-probabilities, as runs without recomputation have it.
    """
    largest: Observation | None = None
    for _ in range(NATURAL_STEPS):
        rollouts = run.roll(run.sampler(age=NATURAL_AGE))
        batch = run.ordinary(rollouts)
        gradient, seen, _ = run.observe(recorder, batch, UNCLIPPED)
        if seen.event is Event.SPIKE:
            return seen
        if largest is None or gradient.norm > (largest.norm or 0.0):
            largest = seen
        run.advance(gradient, float(batch.column("reward").mean()), NATURAL_RATE)
    assert largest is not None
    return _at(largest, None)


def _at(seen: Observation, path: Path | None) -> Observation:
    return replace(seen, path=path, event=Event.ORDINARY)


def _quiet(recorder: SpikeRecorder, home: Path, directory: Path) -> Path | None:
    """The run's own quiet step; where the recorder met none, the base run's."""
    own = recorder.snapshots(Event.QUIET)
    if own:
        return own[-1]
    source = quiet_of(home)
    if source is None:
        return None
    target = directory / layout.QUIET_ROOT / source.name
    return Path(shutil.copytree(source, target))


def _inside(path: Path | None, directory: Path) -> str | None:
    return None if path is None else path.relative_to(directory).as_posix()
