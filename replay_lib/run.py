"""Replay a case under experiments, judge each: what both doors call.

One worker a case, all experiments in it. The baseline is replayed twice in separate requests:
whether replays repeat bit for bit is seen, never trusted from a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replay_lib.case import Case
from replay_lib.engine.protocol import Engine, Experiment, MitigationCall, Outcome
from replay_lib.errors import BatchError, PatchError, SettingsError, SpikeReplayError
from replay_lib.methods import find, load_methods
from replay_lib.patch import Mitigation
from replay_lib.record.judge import Comparison, Recorded, Traits, judge_outcome
from replay_lib.record.result import Result
from replay_lib.snapshot.opening import open_snapshot

#: The methods recorded for the published spikes, in the order of their documents.
RECORDED_METHODS = (
    "enable-token-mismatch-tis-max2",
    "use-current-routing-for-first-moe-layer",
    "replay-r3-on-loss-tokens-only",
    "balance-negative-advantages",
    "disable-routing-replay",
)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How to replay; the engine explains each field."""

    device: str = "auto"
    precision: str = "recorded"
    dp_ranks: tuple[int, ...] | None = None
    deterministic: bool = True
    mitigations: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Step:
    """Where a long job stands: ``done`` of ``total`` replays, and what comes next."""

    case: str
    what: str
    done: int
    total: int


#: Errors of one experiment; any other ends the session.
REFUSALS = (PatchError, SettingsError, BatchError)

Tell = Callable[[Step], None]


def _silent(_: Step) -> None:
    return None


def open_engine(snapshot: Path, options: ReplayOptions) -> Engine:
    """Start the built-in engine on ``snapshot``."""
    from replay_lib.engine.session import ReplaySession

    return ReplaySession.open(
        snapshot,
        device=options.device,
        precision=options.precision,
        dp_ranks=options.dp_ranks,
        deterministic=options.deterministic,
        mitigations=options.mitigations,
    )


def recorded_of(snapshot: Path) -> Recorded:
    """What ``snapshot`` states about its step."""
    opened = open_snapshot(snapshot)
    worker = opened.worker
    return Recorded(
        norm=opened.grad_norm_preclip,
        median=opened.grad_norm_median,
        spike_ratio=opened.spike.spike_ratio,
        dtype="bfloat16" if worker.bf16 else "float16" if worker.fp16 else "float32",
        clip_grad=worker.clip_grad,
    )


def parse_experiments(
    texts: Iterable[str], against: str, methods: Mapping[str, Mitigation]
) -> list[Experiment]:
    """Experiments as written on a command line; PatchError before anything slow is started."""
    experiments = [Experiment.parse(text, against) for text in texts]
    for experiment in experiments:
        for call in (*experiment.mitigations, *experiment.against):
            find(call.slug, methods).patches(call.params)
    return experiments


@dataclass
class OpenCase:
    """A case with its worker; outcomes are kept, so nothing is replayed twice by accident."""

    case: Case
    options: ReplayOptions
    recorded: Recorded
    methods: Mapping[str, Mitigation]
    engine: Engine
    baseline: Outcome
    repeat: Outcome
    _outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    _quiet_norms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(
        cls, case: Case, options: ReplayOptions, methods: Mapping[str, Mitigation] | None = None
    ) -> OpenCase:
        """Start a worker for ``case`` and replay its baseline twice."""
        case.require()
        recorded = recorded_of(case.snapshot)
        known = load_methods(options.mitigations) if methods is None else methods
        engine = open_engine(case.snapshot, options)
        try:
            first, again = (_run_one(engine, Experiment.baseline()) for _ in range(2))
        except BaseException:
            engine.close()
            raise
        kept = {_key(first.experiment): first}
        return cls(case, options, recorded, known, engine, first, again, kept)

    def results(self, experiments: Sequence[Experiment]) -> Iterator[Result]:
        """Judged results in the order of ``experiments``, each as soon as it is known."""
        self._measure_quiet(experiments)
        wanted = [Experiment(mitigations=e.against) for e in experiments] + list(experiments)
        missing = {_key(e): e for e in wanted if _key(e) not in self._outcomes}
        arriving = self.engine.run_many(list(missing.values())) if missing else iter(())
        for experiment in experiments:
            yield self._judge(experiment, arriving)

    def close(self) -> None:
        """End the worker; safe to call twice."""
        self.engine.close()

    def _judge(self, experiment: Experiment, arriving: Iterator[Outcome]) -> Result:
        compared = self._outcome(Experiment(mitigations=experiment.against), arriving)
        outcome = self._outcome(experiment, arriving)
        beside = Comparison(
            baseline=self.baseline,
            repeat_norm=self.repeat.grad_norm_preclip,
            repeat_digest=self.repeat.digest,
            compared=compared,
            quiet_scale=self._quiet_scale(experiment),
        )
        return judge_outcome(
            outcome,
            beside=beside,
            session=self.engine.info,
            case=self.case,
            recorded=self.recorded,
            traits=self._traits(experiment.mitigations),
        )

    def _outcome(self, experiment: Experiment, arriving: Iterator[Outcome]) -> Outcome:
        while _key(experiment) not in self._outcomes:
            outcome = next(arriving)
            self._outcomes[_key(outcome.experiment)] = outcome
        return self._outcomes[_key(experiment)]

    def _traits(self, calls: Sequence[MitigationCall]) -> Traits:
        used = [find(call.slug, self.methods) for call in calls]
        return Traits(
            diagnostic=any(m.diagnostic for m in used),
            changes_unit=any(m.changes_unit for m in used),
            after_norm=bool(used) and all(m.after_norm for m in used),
        )

    def _measure_quiet(self, experiments: Sequence[Experiment]) -> None:
        """Norms on the quiet control, for methods that change the unit of the loss."""
        asked = [Experiment(mitigations=e.mitigations) for e in experiments]
        asked = [e for e in asked if self._traits(e.mitigations).changes_unit]
        missing = [e for e in asked if e.name not in self._quiet_norms]
        if self.case.quiet is None or not missing:
            return
        quiet = open_engine(self.case.quiet, self.options)
        try:
            for outcome in quiet.run_many([Experiment.baseline(), *missing]):
                self._quiet_norms[outcome.experiment.name] = outcome.grad_norm_preclip
        finally:
            quiet.close()

    def _quiet_scale(self, experiment: Experiment) -> float | None:
        norm = self._quiet_norms.get(experiment.name)
        baseline = self._quiet_norms.get("baseline")
        return norm / baseline if norm is not None and baseline else None


@dataclass(frozen=True)
class Refusal:
    """An experiment that could not be replayed on this case, and why."""

    case: str
    experiment: str
    error: SpikeReplayError


@dataclass(frozen=True)
class Replayed:
    """Results in the order asked for, and the experiments that were refused."""

    results: tuple[Result, ...] = ()
    refused: tuple[Refusal, ...] = ()

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(self.results + other.results, self.refused + other.refused)

    @property
    def exit_code(self) -> int:
        """That of the first refusal, else whether a verdict is worse than expected."""
        if self.refused:
            return self.refused[0].error.exit_code
        return int(any(result.red for result in self.results))


def replay_case(
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    tell: Tell = _silent,
) -> Replayed:
    """The baseline's result, then those of ``experiments``, from one session.

    An experiment that a case cannot take (a column is absent, a setting contradicts) is refused
    alone; the others are replayed.
    """
    asked = [Experiment.baseline(), *(e for e in experiments if e.mitigations)]
    tell(Step(case.name, "starting the worker, reading the snapshot", 0, len(asked)))
    opened = OpenCase.open(case, options)
    results: list[Result] = []
    try:
        tell(Step(case.name, "replaying", 0, len(asked)))
        for result in opened.results(asked):
            results.append(result)
            tell(
                Step(case.name, f"{result.experiment}: {result.verdict}", len(results), len(asked))
            )
        return Replayed(tuple(results))
    except REFUSALS:
        return _one_by_one(opened, asked)
    finally:
        opened.close()


def _one_by_one(opened: OpenCase, experiments: Sequence[Experiment]) -> Replayed:
    """After a refusal: what was replayed already is kept, so only the rest is replayed."""
    replayed = Replayed()
    for experiment in experiments:
        try:
            replayed += Replayed(tuple(opened.results([experiment])))
        except REFUSALS as error:
            replayed += Replayed((), (Refusal(opened.case.name, experiment.name, error),))
    return replayed


def _key(experiment: Experiment) -> tuple[str, str]:
    """What is replayed, and what its retained shares are relative to."""
    return experiment.name, Experiment(mitigations=experiment.against).name


def _run_one(engine: Engine, experiment: Experiment) -> Outcome:
    (outcome,) = engine.run_many([experiment])
    return outcome
