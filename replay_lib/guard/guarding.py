"""Run cases with the trainer under test and with the reference, and collect what changed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay_lib.case import Case
from replay_lib.engine.protocol import Engine, Experiment
from replay_lib.errors import SpikeReplayError
from replay_lib.guard.compare import (
    BASELINE,
    Change,
    Pair,
    changes_of,
    pairs_of,
    reference_faults,
    to_measure,
    with_differences,
)
from replay_lib.guard.gradients import difference, save_gradients
from replay_lib.guard.reference import Reference
from replay_lib.methods import load_methods
from replay_lib.patch import Mitigation
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.run import (
    AtLast,
    Keep,
    Replayed,
    ReplayOptions,
    Step,
    Tell,
    beside_case,
    open_engine,
    parse_experiments,
    replay_case,
)

#: As ``Keep``, and told under which trainer.
KeepUnder = Callable[[Result | Refusal, str], None]
#: Gradients compared a case where only methods differ, beside the norms of all of them.
MOST_GRADIENTS = 8


@dataclass(frozen=True)
class Guarded:
    """What both trainers gave, and what changed between them."""

    trainer: str
    reference: str
    pairs: tuple[Pair, ...]
    results: tuple[Result, ...]

    @property
    def changes(self) -> list[Change]:
        """Everything that arithmetic does not explain, in the order of the cases."""
        return changes_of(self.pairs)

    @property
    def faults(self) -> list[str]:
        """Why the reference is no good measure in some case."""
        return reference_faults(self.pairs)

    def exit_code(self, fail_on: str) -> int:
        """1 for a change that ``fail_on`` (worse or changed) names; else that of an error.

        Where no experiment could be replayed under one of the trainers nothing was compared: the
        error's own, the tested trainer's first.
        """
        if any(change.worse or fail_on == "changed" for change in self.changes):
            return 1
        for side in ("tested", "reference"):
            found = [getattr(pair, side) for pair in self.pairs]
            errors = [one for one in found if isinstance(one, SpikeReplayError)]
            if errors and len(errors) == len(found):
                return int(errors[0].exit_code)
        return 0


def guard(
    cases: Sequence[Case],
    labels: Sequence[str],
    options: ReplayOptions,
    reference: Reference,
    tell: Tell,
    *,
    keep: KeepUnder = lambda _one, _trainer: None,
) -> Guarded:
    """Every case under ``options.trainer`` and under ``reference``.

    ``keep`` is given each result and each refusal as it arrives, with the name of its trainer.

    ``labels`` are the methods to try; none: those that a case expects something of. A case whose
    snapshot is absent raises before anything is replayed.
    """
    methods = load_methods(options.mitigations)
    for case in cases:
        case.require()
    asked = [_experiments(case, labels, methods) for case in cases]
    theirs = dataclasses.replace(options, trainer=reference.trainer, trainer_path=reference.path)
    both = _Both(tested=options, reference=theirs, told=reference.told, tell=tell, keep=keep)
    pairs: list[Pair] = []
    results: list[Result] = []
    for case, experiments in zip(cases, asked, strict=True):
        with tempfile.TemporaryDirectory(prefix="guard-") as home:
            found, after = _guard_case(case, experiments, both, Path(home))
        pairs += found
        results += after.results
    return Guarded(options.trainer or "", reference.told, tuple(pairs), tuple(results))


@dataclass(frozen=True)
class _Both:
    tested: ReplayOptions
    reference: ReplayOptions
    told: str
    tell: Tell
    keep: KeepUnder


def _guard_case(
    case: Case, experiments: Sequence[Experiment], both: _Both, home: Path
) -> tuple[list[Pair], Replayed]:
    """One case in two sessions, one after the other; in three where methods alone changed.

    The reference's baseline gradient is kept in ``home`` from the first one on.
    """
    theirs: list[Path] = []
    mine: list[tuple[Experiment, Path]] = []

    def keep_baseline(engine: Engine, replayed: Replayed) -> None:
        theirs.extend(save_gradients(engine, [Experiment.baseline()], home))

    def keep_changed(engine: Engine, replayed: Replayed) -> None:
        wanted = to_measure(pairs_of(case.name, before, replayed), MOST_GRADIENTS)
        asked = [_experiment(p) for p in wanted]
        mine.extend(zip(asked, save_gradients(engine, asked, home), strict=True))

    tell = both.tell
    before = _replayed(case, experiments, both.reference, _as(both, both.told), keep_baseline)
    name = both.tested.trainer or ""
    after = _replayed(case, experiments, both.tested, _as(both, name), keep_changed)
    asked = [experiment for experiment, _ in mine]
    if asked and asked != [Experiment.baseline()]:
        tell(Step(case.name, "replaying the reference's gradients", 0, len(asked)))
        theirs = _gradients(case, asked, both.reference, home)
    found = {e.name: difference(m, t) for (e, m), t in zip(mine, theirs, strict=False)}
    return with_differences(pairs_of(case.name, before, after), found), after


def _gradients(
    case: Case, experiments: Sequence[Experiment], options: ReplayOptions, home: Path
) -> list[Path]:
    engine = open_engine(case.snapshot, beside_case(case, options))
    try:
        return save_gradients(engine, experiments, home)
    finally:
        engine.close()


def _experiment(pair: Pair) -> Experiment:
    assert isinstance(pair.tested, Result), "only what was replayed is measured"
    return Experiment(mitigations=pair.tested.mitigations)


def _experiments(
    case: Case, labels: Sequence[str], methods: Mapping[str, Mitigation]
) -> list[Experiment]:
    wanted = [label for label in labels or case.expected if label != BASELINE]
    return parse_experiments(wanted, BASELINE, methods)


def _replayed(
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    turn: tuple[Tell, Keep],
    at_last: AtLast,
) -> Replayed:
    """What ``options`` give; an error of the whole case stands for its baseline."""
    tell, keep = turn
    try:
        return replay_case(case, experiments, options, tell, at_last, keep=keep)
    except SpikeReplayError as error:
        refusal = Refusal(case.name, BASELINE, error)
        keep(refusal)
        return Replayed((), (refusal,))


def _as(both: _Both, trainer: str) -> tuple[Tell, Keep]:
    """``tell`` and ``keep`` with the name of the trainer whose turn it is."""

    def named(step: Step) -> None:
        both.tell(dataclasses.replace(step, what=f"{trainer}: {step.what}"))

    return named, lambda one: both.keep(one, trainer)
