"""Methods of somebody's own, results of them in a ledger, and an engine without a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay_lib.engine.protocol import Experiment, MitigationCall, Outcome
from replay_lib.method_cards import writing
from replay_lib.methods import load_methods
from replay_lib.record import ledger
from replay_lib.record.cards import read_cards, update_cards
from replay_lib.record.result import Result
from replay_lib.record.task import Task
from tests.report.make_signals import make_signals
from tests.report.make_task import keep_run, results_of

JOB = "axrl-v002-052915-math-moe-r3"
ROLE = "actor"
METHOD = "clip-rollout-log-ratio"  # proven on zoo-natural, with a card
OWN = '''"""Methods of my own."""

from __future__ import annotations

import math
import os

from replay_lib.patch import batch_patch, settings_patch

# how far apart, in nats
BOUND = 0.1
UNUSED = os.sep


def _near(one, other):
    return one.clamp(other - BOUND, other + BOUND)


def stay_near(factor: float = 1.0):
    """Rollout log-probabilities near the old ones.

    In nats, on loss tokens > elsewhere | nowhere.
    """

    def apply(batch):
        old, rollout = batch.column("old_logprobs"), batch.column("rollout_logprobs")
        near = _near(rollout, old) * math.copysign(factor, 1.0)
        return batch.replace(rollout_logprobs=near.where(batch.loss_mask, rollout))

    return batch_patch(apply)


def two_at_once():
    """Both."""
    return [stay_near(), settings_patch(mismatch_token_clip_max=BOUND * 20)]


def _made():
    def hidden():
        """Hidden."""
        return settings_patch(mismatch_token_clip_max=2.0)

    return hidden


hidden = _made()
'''


def own_methods(directory: Path, monkeypatch: Any, name: str = "own_spike_methods") -> str:
    """A module that can be imported from now on; its name."""
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(directory))
    sys.modules.pop(name, None)
    return name


def result(method: str = METHOD, **changes: Any) -> Result:
    """The proven result of zoo-natural as one of ``method``, with ``changes``."""
    proven = next(r for r in results_of("zoo-natural") if r.experiment == METHOD)
    params = changes.pop("params", {})
    call = MitigationCall(slug=method, params=params)
    named = {"experiment": call.label(), "mitigations": (call,)}
    return proven.model_copy(update=named | changes)


def task_with(root: Path, *results: Result, signals: bool = True) -> Task:
    """A task on a snapshot that is there, with a baseline before ``results``."""
    task = Task(JOB, root)
    output = root / "outputs" / f"20260529~{JOB}__{ROLE}"
    snapshot = output / "checkpoints" / "spike_snapshots-active" / "iter_0000061"
    snapshot.mkdir(parents=True, exist_ok=True)
    if signals:
        told = make_signals().model_dump(mode="json", by_alias=True)
        ledger.append(task, "analyzed", snapshot=str(snapshot), signals=told)
    keep_run(task, "a" * 12, [results_of("zoo-natural")[0], *results], snapshot=str(snapshot))
    return task


class Beside:
    """Gives the cosines of ``cosines`` by slug, 0.5 for all others, and logs what it is asked."""

    def __init__(self, cosines: Mapping[str, float | None], norm: float) -> None:
        self.cosines, self.norm = cosines, norm
        self.asked: list[list[str]] = []
        self.closed = 0
        self.info = _Info()

    def run_beside(self, experiment: Experiment, others: Sequence[Experiment]) -> Iterator[Outcome]:
        self.asked.append([one.name for one in others])
        for one in others:
            cosine = self.cosines.get(one.name, 0.5)
            if isinstance(cosine, Exception):
                raise cosine
            yield Outcome(
                experiment=one,
                grad_norm_preclip=self.norm,
                digest="d",
                loss=0.5,
                denominator=1.0,
                param_norms={},
                touched={},
                cosine=1.0 if one == experiment else cosine,
                seconds=0.1,
            )

    def close(self) -> None:
        self.closed += 1


class _Info:
    dtype, device = "float32", "cpu"


def fake_engine(monkeypatch: Any, cosines: Any = None, norm: float | None = None) -> Beside:
    """In the place of the real one for ``record_method``."""
    engine = Beside(cosines or {}, result().grad_norm_preclip if norm is None else norm)
    monkeypatch.setattr(writing, "open_engine", lambda _snapshot, _options: engine)
    return engine


def some_cards(directory: Path, *slugs: str) -> Path:
    """Cards of built-in methods, with their index."""
    directory.mkdir()
    for slug, card in read_cards().items():
        if slug in (slugs or (METHOD, "clip-advantages", "disable-routing-replay")):
            (directory / f"{slug}.md").write_text(card.text)
    methods = {s: m for s, m in load_methods().items() if (directory / f"{s}.md").exists()}
    update_cards([], methods, directory)
    return directory
