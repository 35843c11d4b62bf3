"""Run a search: single methods, then pairs of what helped; what was replayed earlier is kept.

Every result is appended to the results file as soon as it is known, so a killed search loses what
its last request had not answered. The same command again reads that file and replays the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from replay_lib.case import Case
from replay_lib.engine.early import resolve_device
from replay_lib.engine.layout import AUTO, Layout
from replay_lib.engine.protocol import Experiment, is_loss_only
from replay_lib.engine.versions import versions
from replay_lib.methods import resolve
from replay_lib.patch import Mitigation
from replay_lib.quiet import REFUSALS
from replay_lib.record.judge import label_of
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.record.results_file import append_results, read_results
from replay_lib.run import NATIVE, Keep, OpenCase, Replayed, ReplayOptions, Step, Tell
from replay_lib.sweep.earlier import Setting, earlier, same_step
from replay_lib.sweep.pairs import Choice, choose_pairs
from replay_lib.sweep.pareto import Front, front_of_results
from replay_lib.trainers.names import AXRL, GRPO

BASELINE = Experiment.baseline()
#: Experiments of a search, single methods and pairs together, where nobody says otherwise.
BUDGET = 60


@dataclass(frozen=True, kw_only=True)
class Swept:
    """A search that is over.

    ``results`` are the baseline's, those of single methods and those of pairs. ``resumed`` of them
    were known before. ``untried`` are methods, ``left`` pairs that the budget had no room for,
    ``skipped`` methods and pairs that were not paired, each with its reason.
    """

    results: tuple[Result, ...]
    refused: tuple[Refusal, ...]
    resumed: int
    budget: int
    untried: tuple[str, ...]
    pairs: tuple[str, ...]
    left: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    front: Front
    notes: tuple[str, ...] = ()

    @property
    def replayed(self) -> Replayed:
        """Everything as other commands have it."""
        return Replayed(self.results, self.refused)

    @property
    def exit_code(self) -> int:
        """As of ``Replayed``; of a pair that the case does not list nothing is expected."""
        told = [r for r in self.results if r.experiment not in self.pairs or r.expected is not None]
        return Replayed(tuple(told), self.refused).exit_code


@dataclass(frozen=True)
class _Plan:
    """What is tried: single methods, and once these are known, pairs in the order of choice."""

    budget: int
    tried: tuple[Experiment, ...]
    untried: tuple[Experiment, ...]
    choice: Choice = field(default_factory=Choice)

    @property
    def room(self) -> int:
        """How many pairs the single methods left room for."""
        return self.budget - len(self.tried)

    @property
    def pairs(self) -> tuple[Experiment, ...]:
        """Pairs that are tried, compared with what the single methods are compared with."""
        chosen = self.choice.pairs[: self.room]
        against = self.tried[0].against if self.tried else ()
        return tuple(
            Experiment(mitigations=pair.experiment.mitigations, against=against) for pair in chosen
        )


@dataclass
class _Search:
    """A search under way; ``known`` are results by experiment, ``refused`` what cannot be had."""

    opened: OpenCase
    digest: str
    file: Path | None
    known: dict[str, Result] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()  # of ``known``, those that an earlier run has left
    refused: dict[str, Refusal] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sweep(
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    *,
    budget: int = BUDGET,
    file: Path | None = None,
    tell: Tell = lambda _step: None,
    keep: Keep = lambda _one: None,
) -> Swept:
    """Replay ``experiments``, then pairs of those that helped, ``budget`` of them all at most.

    The baseline is not counted. Where ``file`` (JSON lines of results) has results of the same
    case's files under the same trainer, backend, dtype, device and versions, and the baseline comes
    out as it did beside them, they count as replayed. ``keep`` is given everything that is replayed
    now, as it arrives. Errors as of ``replay_case``; one of a single experiment leaves the others.
    """
    opened = OpenCase.open(case, options)
    try:
        search = _Search(opened, case.digest(), file)
        opened.keep = lambda one: keep(_stamped(search, one) if isinstance(one, Result) else one)
        each = list({e.name: e for e in experiments if e.mitigations}.values())
        ordered = _cheapest_first(each, opened.methods)
        plan = _Plan(budget, tuple(ordered[:budget]), tuple(ordered[budget:]))
        _look_back(search, label_of(each[0].against) if each else BASELINE.name)
        _replay(search, [BASELINE, *plan.tried], tell, "single methods")
        results = [search.known[e.name] for e in each if _there(search, plan, e)]
        plan = replace(plan, choice=choose_pairs(results, opened.methods))
        _replay(search, [BASELINE, *plan.tried, *plan.pairs], tell, "pairs")
        return _swept(search, plan)
    finally:
        opened.close()


def _there(search: _Search, plan: _Plan, experiment: Experiment) -> bool:
    # an earlier run with a larger budget may have left more than was asked for now
    return experiment in plan.tried and experiment.name in search.known


def _cheapest_first(
    experiments: Sequence[Experiment], methods: Mapping[str, Mitigation]
) -> list[Experiment]:
    """Those that change only the loss first: they share a forward. Else as they were given."""

    def own_forward(experiment: Experiment) -> bool:
        patches = [p for call in experiment.mitigations for p in resolve(call, methods)]
        return not is_loss_only([patch.seam for patch in patches])

    return sorted(experiments, key=own_forward)


def _look_back(search: _Search, against: str) -> None:
    """Take over what ``search.file`` has of an earlier run."""
    if search.file is None or not search.file.is_file():
        return
    search.known = earlier(read_results(search.file), _setting(search), against)
    search.kept = frozenset(search.known)


def _setting(search: _Search) -> Setting:
    options, case = search.opened.options, search.opened.case
    recorded = options.precision == "recorded"
    return Setting(
        case=case.name,
        case_digest=search.digest,
        trainer=options.trainer or (GRPO if options.backend == NATIVE else AXRL),
        backend=options.backend,
        dtype=search.opened.recorded.dtype if recorded else options.precision,
        device=resolve_device(options.device),
        versions=versions(),
        dp_ranks=options.dp_ranks,
        layout=None if options.layout == AUTO else Layout.parse(options.layout).sizes,
    )


def _replay(search: _Search, wanted: Sequence[Experiment], tell: Tell, what: str) -> None:
    """Have results of all ``wanted``; those of the baseline come first in each request."""

    def missing() -> list[Experiment]:
        known = {*search.known, *search.refused}
        return [e for e in wanted if e.name not in known]

    def told(doing: str) -> None:
        tell(Step(search.opened.case.name, doing, len(wanted) - len(missing()), len(wanted)))

    while left := missing():
        told(f"replaying {what}")
        _ask(search, [BASELINE, *(e for e in left if e.mitigations)], told)


def _ask(search: _Search, experiments: Sequence[Experiment], told: Callable[[str], None]) -> None:
    """One request; where an experiment of it is refused, one for each half of the rest.

    Patches are applied before anything is replayed, so a request that is refused costs little.
    """
    opened = search.opened
    if opened.quiet is not None and opened.quiet.missing(experiments):
        told("replaying the quiet control")
        opened.measure_quiet(experiments)
    told("starting the worker, reading the snapshot")
    opened.start()
    try:
        for result in opened.results(experiments):
            _keep(search, result)
            told(f"{result.experiment}: {result.verdict}")
    except REFUSALS as error:
        rest = [e for e in experiments if e.mitigations and e.name not in search.known]
        if not rest:
            raise
        if BASELINE.name not in search.known:
            _ask(search, [BASELINE], told)
        if len(rest) == 1:
            name = rest[0].name
            search.refused[name] = Refusal(opened.case.name, name, error)
            opened.keep(search.refused[name])
            return
        middle = len(rest) // 2
        for part in (rest[:middle], rest[middle:]):
            _ask(search, [BASELINE, *part], told)


def _keep(search: _Search, result: Result) -> None:
    """Keep a new result; a baseline that is another than before takes all earlier ones away."""
    before = search.known.get(result.experiment)
    if before is not None and result.is_baseline:
        if same_step(before, result):
            return
        search.notes.append(
            f"{len(search.known)} earlier results do not count, the baseline's gradient is another "
            f"now: its norm was {before.grad_norm_preclip!r} and is {result.grad_norm_preclip!r}"
        )
        search.known, search.kept = {}, frozenset()
    stamped = _stamped(search, result)
    if search.file is not None:
        append_results(search.file, [stamped])
    search.known[result.experiment] = stamped


def _stamped(search: _Search, result: Result) -> Result:
    return result.model_copy(update={"case_digest": search.digest})


def _swept(search: _Search, plan: _Plan) -> Swept:
    names = [e.name for e in (BASELINE, *plan.tried, *plan.pairs)]
    results = tuple(search.known[name] for name in names if name in search.known)
    chosen = [pair.experiment.name for pair in plan.choice.pairs]
    return Swept(
        results=results,
        refused=tuple(search.refused.values()),
        resumed=len(search.kept.intersection(names)),
        budget=plan.budget,
        untried=tuple(e.name for e in plan.untried),
        pairs=tuple(chosen[: plan.room]),
        left=tuple(chosen[plan.room :]),
        skipped=plan.choice.skipped,
        front=front_of_results(results),
        notes=tuple(search.notes),
    )
