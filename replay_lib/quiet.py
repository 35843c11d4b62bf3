"""What methods do to an ordinary step of the same run: their side effects on the quiet control.

A session of its own that ends before it answers: the spike's model is not in memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replay_lib.case import Case
from replay_lib.engine.protocol import Engine, Experiment, MitigationCall, Outcome
from replay_lib.errors import BatchError, PatchError, SettingsError, SpikeReplayError
from replay_lib.record.judge import Recorded, Traits, judge_quiet
from replay_lib.record.result import SideEffect

#: Errors of one experiment; any other ends the session.
REFUSALS = (PatchError, SettingsError, BatchError)


@dataclass
class QuietControl:
    """Side effects by the experiment's name, measured together and then kept.

    ``read`` tells what the quiet snapshot states, ``start`` starts a worker on it, ``traits`` what
    the methods of an experiment declare. What cannot be
    replayed there, or a quiet control that cannot be used at all, is a fault of the side effect
    and leaves the verdicts on the spike alone.
    """

    case: Case
    read: Callable[[], Recorded]
    start: Callable[[], Engine]
    traits: Callable[[Sequence[MitigationCall]], Traits]
    param_norms: dict[str, float] | None = None  # of its baseline, once that was replayed
    _effects: dict[str, SideEffect] = field(default_factory=dict)

    def effect(self, experiment: Experiment) -> SideEffect | None:
        """What ``experiment`` does to the quiet control; None before it was measured."""
        return self._effects.get(experiment.name)

    def missing(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        """Those to be measured still, each once and compared with the baseline."""
        asked = {e.name: Experiment(mitigations=e.mitigations) for e in experiments}
        return [e for e in asked.values() if e.mitigations and e.name not in self._effects]

    def measure(self, experiments: Sequence[Experiment]) -> None:
        """Measure all that is missing in one session, which has ended when this returns."""
        missing = self.missing(experiments)
        if not missing:
            return
        try:
            self._replay(missing)
        except SpikeReplayError as error:  # not of one experiment: the rest was not reached
            for experiment in self.missing(missing):
                self._refuse(experiment, error)

    def _replay(self, missing: Sequence[Experiment]) -> None:
        recorded = self.read()
        engine = self.start()
        try:
            baseline = self._all_at_once(engine, recorded, missing)
            refused = self.missing(missing)
            if refused and baseline is None:
                (baseline,) = engine.run_many([Experiment.baseline()])
            for experiment in refused:
                assert baseline is not None
                self._alone(engine, recorded, experiment, baseline)
        finally:
            engine.close()

    def _all_at_once(
        self, engine: Engine, recorded: Recorded, missing: Sequence[Experiment]
    ) -> Outcome | None:
        """Keep what arrives, until one experiment is refused; returns the baseline if it came."""
        baseline: Outcome | None = None
        try:
            for outcome in engine.run_many([Experiment.baseline(), *missing]):
                baseline = baseline or outcome
                self._keep(engine, recorded, outcome, baseline)
        except REFUSALS:
            pass  # told below, for the experiment that it belongs to
        return baseline

    def _alone(
        self, engine: Engine, recorded: Recorded, experiment: Experiment, baseline: Outcome
    ) -> None:
        try:
            (outcome,) = engine.run_many([experiment])
        except REFUSALS as error:
            self._refuse(experiment, error)
        else:
            self._keep(engine, recorded, outcome, baseline)

    def _keep(
        self, engine: Engine, recorded: Recorded, outcome: Outcome, baseline: Outcome
    ) -> None:
        self.param_norms = baseline.param_norms
        self._effects[outcome.experiment.name] = judge_quiet(
            outcome,
            baseline=baseline,
            session=engine.info,
            case=self.case,
            recorded=recorded,
            traits=self.traits(outcome.experiment.mitigations),
        )

    def _refuse(self, experiment: Experiment, error: SpikeReplayError) -> None:
        self._effects[experiment.name] = SideEffect(reason=str(error))
