"""What a running worker has replayed: nothing is replayed twice by accident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from replay_lib.engine.protocol import Engine, Experiment, Outcome


@dataclass
class Replays:
    """A running worker and what it has replayed; nothing is replayed twice by accident."""

    engine: Engine
    baseline: Outcome
    due: int  # replays of the baseline that are still to come
    again: list[Outcome] = field(default_factory=list)  # those that came after the first
    kept: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def ask(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
        """Replay what is not known yet, the baselines that are still due first.

        All but the last of these have a request and so a forward of their own.
        """
        while self.due > 1:
            (outcome,) = self.engine.run_many([Experiment.baseline()])
            yield self._repeated(outcome)
        wanted = [Experiment(mitigations=e.against) for e in experiments] + list(experiments)
        missing = {key_of(e): e for e in wanted if key_of(e) not in self.kept}
        asked = [*[Experiment.baseline()] * self.due, *missing.values()]
        for outcome in self.engine.run_many(asked) if asked else ():
            if self.due:
                self._repeated(outcome)
            else:
                self.kept[key_of(outcome.experiment)] = outcome
            yield outcome

    def _repeated(self, outcome: Outcome) -> Outcome:
        self.due -= 1
        self.again.append(outcome)
        return outcome

    def outcome(self, experiment: Experiment, arriving: Iterator[Outcome]) -> Outcome:
        """What ``experiment`` gave, waited for if need be."""
        while key_of(experiment) not in self.kept:
            next(arriving)
        return self.kept[key_of(experiment)]

    def repeats(self, arriving: Iterator[Outcome]) -> tuple[Outcome, ...]:
        """The baselines after the first, waited for if need be."""
        while self.due:
            next(arriving)
        return tuple(self.again)


def key_of(experiment: Experiment) -> tuple[str, str]:
    """What is replayed, and what its retained shares are relative to."""
    return experiment.name, Experiment(mitigations=experiment.against).name
