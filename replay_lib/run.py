"""Replay a case under experiments, judge each: what both doors call.

One worker a case, all experiments in it. The baseline is replayed twice or as often as is asked
for, in separate requests: whether replays repeat bit for bit is seen, never trusted from a flag.
The last one goes with the first experiments, where it costs a backward of its own on the forward
that they share; that forward is another than the other baselines', so both passes are repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from replay_lib.case import Case
from replay_lib.engine.early import check_before_start
from replay_lib.engine.layout import AUTO, Layout
from replay_lib.engine.nodes import Nodes
from replay_lib.engine.protocol import Engine, Experiment, Outcome
from replay_lib.errors import UsageError
from replay_lib.methods import find, load_methods
from replay_lib.patch import Mitigation
from replay_lib.quiet import REFUSALS, QuietControl
from replay_lib.record.judge import Comparison, Recorded, judge_outcome, same_part, traits_of
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result, quiet_faults
from replay_lib.replays import Replays, key_of
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.trainers.names import AXRL, GRPO, check_name

NATIVE = "native"
BACKENDS = (NATIVE, AXRL)
#: The methods recorded for the published spikes, in the order of their documents.
RECORDED_METHODS = (
    "enable-token-mismatch-tis-max2",
    "use-current-routing-for-first-moe-layer",
    "replay-r3-on-loss-tokens-only",
    "balance-negative-advantages",
    "disable-routing-replay",
)

#: The least number of the baseline's replays that shows whether they repeat.
LEAST_REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How to replay; the engine explains each field that is not explained here.

    ``repeats``: how often the baseline is replayed, at least twice. The spread of its norm enters
    the noise band of every verdict.
    """

    device: str = "auto"
    precision: str = "recorded"
    dp_ranks: tuple[int, ...] | None = None
    layout: str = AUTO
    rows: str = "recorded"
    deterministic: bool = True
    mitigations: tuple[Path, ...] = ()
    trainer: str | None = None  # None: the backend's own, grpo or axrl
    trainer_path: tuple[Path, ...] = ()  # the only places that module:factory may come from
    repeats: int = LEAST_REPEATS
    backend: str = NATIVE
    paths_from: Path | None = None  # None: a case's directory, without a case the current one
    nodes: Nodes | None = None  # None: this machine alone

    def __post_init__(self) -> None:
        if self.repeats < LEAST_REPEATS:
            raise UsageError(
                f"--repeats: found {self.repeats}, expected {LEAST_REPEATS} or more: one replay of "
                "the baseline shows no spread"
            )
        if self.layout != AUTO:
            Layout.parse(self.layout)
        if self.trainer is not None:
            check_name(self.trainer)
        _check_backend(self)


def _check_backend(options: ReplayOptions) -> None:
    """UsageError that names what a backend cannot honour."""
    if options.backend not in BACKENDS:
        raise UsageError(f"backend {options.backend!r}: expected one of {', '.join(BACKENDS)}")
    if options.backend == NATIVE:
        return
    given = {
        "trainer": options.trainer not in (None, AXRL),
        "precision": options.precision != "recorded",
        "dp-ranks": options.dp_ranks is not None,
        "layout": options.layout != AUTO,
        "rows": options.rows != "recorded",
        "nnodes": options.nodes is not None,
    }
    odd = [f"--{name}" for name, there in given.items() if there]
    if odd:
        raise UsageError(
            f"backend axrl: it cannot honour {', '.join(odd)}: AXRL replays the whole step with "
            "its own loss, as it was recorded"
        )


@dataclass(frozen=True)
class Step:
    """Where a long job stands: ``done`` of ``total`` replays, and what comes next."""

    case: str
    what: str
    done: int
    total: int


Tell = Callable[[Step], None]


#: Called with each result and each refused experiment as it arrives, before anything is told of it.
Keep = Callable[[Result | Refusal], None]


def _silent(_: Step) -> None:
    return None


def _kept_nowhere(_: Result | Refusal) -> None:
    return None


def open_engine(snapshot: Path, options: ReplayOptions) -> Engine:
    """Start the backend that ``options`` name on ``snapshot``."""
    if options.backend == AXRL:
        from replay_lib.backend.session import open_axrl

        return open_axrl(snapshot, device=options.device, mitigations=options.mitigations)
    from replay_lib.engine.session import ReplaySession

    return ReplaySession.open(
        snapshot,
        device=options.device,
        precision=options.precision,
        dp_ranks=options.dp_ranks,
        layout=options.layout,
        rows=options.rows,
        deterministic=options.deterministic,
        mitigations=options.mitigations,
        trainer=options.trainer or GRPO,
        trainer_path=options.trainer_path,
        paths_from=options.paths_from or Path(),
        nodes=options.nodes,
    )


def beside_case(case: Case, options: ReplayOptions) -> ReplayOptions:
    """``options`` with relative paths of methods starting at the case's directory."""
    if options.paths_from is not None or case.file is None:
        return options
    return dataclasses.replace(options, paths_from=case.file.parent)


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
    """A case and, from its first replay on, its worker.

    The quiet control is replayed before the spike's worker starts: its model is gone by then, and
    one session serves all methods of a run. A method asked for later ends the spike's worker
    first, so that a machine never has to hold two models of a case.
    """

    case: Case
    options: ReplayOptions
    recorded: Recorded
    methods: Mapping[str, Mitigation]
    quiet: QuietControl | None
    keep: Keep = _kept_nowhere  # of what is asked for again, the first result alone
    _replays: Replays | None = None
    _arrived: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def open(
        cls,
        case: Case,
        options: ReplayOptions,
        methods: Mapping[str, Mitigation] | None = None,
        keep: Keep = _kept_nowhere,
    ) -> OpenCase:
        """``case`` with its snapshots present; no worker is started yet.

        Raises what ``check_before_start`` finds, and CaseError as of ``Case.require``.
        """
        if options.backend == NATIVE and case.missing() is None:
            check_before_start(
                case.snapshot,
                device=options.device,
                rows=options.rows,
                # elsewhere than here the worker alone can look
                trainer=GRPO if options.trainer_path else options.trainer or GRPO,
            )
        case.require()
        known = load_methods(options.mitigations) if methods is None else methods
        options = beside_case(case, options)
        quiet = _quiet_of(case, options, known)
        return cls(case, options, recorded_of(case.snapshot), known, quiet, keep)

    def start(self) -> None:
        """Start the worker and replay the baseline, unless that is done."""
        if self._replays is not None:
            return
        engine = open_engine(self.case.snapshot, self.options)
        try:
            (first,) = engine.run_many([Experiment.baseline()])
        except BaseException:
            engine.close()
            raise
        self._replays = Replays(
            engine, first, due=self.options.repeats - 1, kept={key_of(first.experiment): first}
        )

    def measure_quiet(self, experiments: Sequence[Experiment]) -> None:
        """Side effects of ``experiments`` that are not known yet, in one session of their own."""
        if self.quiet is not None and self.quiet.missing(experiments):
            self.close()
            self.quiet.measure(experiments)

    def results(self, experiments: Sequence[Experiment]) -> Iterator[Result]:
        """Judged results in the order of ``experiments``, each as soon as it is known."""
        self.measure_quiet(experiments)
        self.start()
        assert self._replays is not None
        arriving = self._replays.ask(experiments)
        for experiment in experiments:
            result = self._judge(self._replays, experiment, arriving)
            if key_of(experiment) not in self._arrived:
                self.keep(result)
                self._arrived.add(key_of(experiment))
            yield result

    def close(self) -> None:
        """End the worker; safe to call twice. The next replay starts another one."""
        if self._replays is not None:
            self._replays.engine.close()
        self._replays = None

    def parting(self, replayed: Replayed, at_last: AtLast) -> Replayed:
        """``replayed``, after ``at_last`` had the worker, if one runs, to itself."""
        if self._replays is not None:
            at_last(self._replays.engine, replayed)
        return replayed

    def _judge(
        self, replays: Replays, experiment: Experiment, arriving: Iterator[Outcome]
    ) -> Result:
        again = replays.repeats(arriving)
        compared = replays.outcome(Experiment(mitigations=experiment.against), arriving)
        outcome = replays.outcome(experiment, arriving)
        beside = Comparison(
            baseline=replays.baseline,
            repeats=again,
            compared=compared,
            same_part=same_part(outcome, replays.kept.values()),
            side_effect=self.quiet.effect(experiment) if self.quiet else None,
            quiet_param_norms=self.quiet.param_norms if self.quiet else None,
        )
        return judge_outcome(
            outcome,
            beside=beside,
            session=replays.engine.info,
            case=self.case,
            recorded=self.recorded,
            traits=traits_of(experiment.mitigations, self.methods),
        )


def _quiet_of(
    case: Case, options: ReplayOptions, methods: Mapping[str, Mitigation]
) -> QuietControl | None:
    if case.quiet is None:
        return None
    path = case.quiet
    # open_engine is looked up when it is called: tests put another one in its place
    return QuietControl(
        case,
        partial(recorded_of, path),
        lambda: open_engine(path, options),
        partial(traits_of, methods=methods),
    )


@dataclass(frozen=True)
class Replayed:
    """Results in the order asked for, and the experiments that were refused."""

    results: tuple[Result, ...] = ()
    refused: tuple[Refusal, ...] = ()

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(self.results + other.results, self.refused + other.refused)

    @property
    def exit_code(self) -> int:
        """That of the first refusal, else 1 for a verdict that is worse than expected.

        A quiet control that is none, or that a method cannot be replayed on, counts as one.
        """
        if self.refused:
            return self.refused[0].error.exit_code
        red = any(result.red for result in self.results)
        return int(red or bool(quiet_faults(self.results)))


AtLast = Callable[[Engine, Replayed], None]


def _no_more(_engine: Engine, _replayed: Replayed) -> None:
    return None


def replay_case(
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    tell: Tell = _silent,
    at_last: AtLast = _no_more,
    *,
    keep: Keep = _kept_nowhere,
) -> Replayed:
    """The baseline's result, then those of ``experiments``, from one session.

    ``at_last`` is given that session and everything that came of it, before the session ends.
    ``keep`` is given each result and each refusal as it arrives, whatever happens after.

    Where the case has a quiet control, ``experiments`` are replayed on that first.
    An experiment that a case cannot take (a column is absent, a setting contradicts) is refused
    alone; the others are replayed.
    """
    asked = [Experiment.baseline(), *(e for e in experiments if e.mitigations)]
    opened = OpenCase.open(case, options, keep=keep)
    try:
        return opened.parting(_all_together(opened, asked, tell), at_last)
    finally:
        opened.close()


def _all_together(opened: OpenCase, asked: Sequence[Experiment], tell: Tell) -> Replayed:
    results: list[Result] = []

    def told(what: str) -> None:
        tell(Step(opened.case.name, what, len(results), len(asked)))

    try:
        if opened.quiet is not None and opened.quiet.missing(asked):
            told("replaying the quiet control")
            opened.measure_quiet(asked)
        told("starting the worker, reading the snapshot")
        opened.start()
        told("replaying")
        for result in opened.results(asked):
            results.append(result)
            told(f"{result.experiment}: {result.verdict}")
    except REFUSALS:
        return _one_by_one(opened, asked)
    return Replayed(tuple(results))


def _one_by_one(opened: OpenCase, experiments: Sequence[Experiment]) -> Replayed:
    """After a refusal: what was replayed already is kept, so only the rest is replayed."""
    replayed = Replayed()
    for experiment in experiments:
        try:
            replayed += Replayed(tuple(opened.results([experiment])))
        except REFUSALS as error:
            refusal = Refusal(opened.case.name, experiment.name, error)
            opened.keep(refusal)
            replayed += Replayed((), (refusal,))
    return replayed
