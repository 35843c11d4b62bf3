"""``replay``, ``sweep`` and ``guard`` on a node: called as the local ones are, and give the same.

The node is looked at, what it lacks is copied, the run is started there or attached to, and its
results arrive one by one. What was kept here of this very run, before a connection broke, is not
kept again.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import NodeError, SnapshotError, UsageError
from replay_lib.guard.guarding import Guarded
from replay_lib.guard.reference import Reference
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.remote import job as told
from replay_lib.remote.parcels import Own, case_parcel, library_parcel, own_parcel, there
from replay_lib.remote.probe import Facts, probe
from replay_lib.remote.running import Run
from replay_lib.remote.shell import Node
from replay_lib.remote.sync import Parcel, send
from replay_lib.run import Replayed, ReplayOptions, Step, Tell
from replay_lib.sweep.sweeping import Swept
from replay_lib.trainers.findable import check_findable
from replay_lib.trainers.names import AXRL, GRPO

Keep = Callable[[Result | Refusal], None]
KeepUnder = Callable[[Result | Refusal, str], None]


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A node as a command line names it.

    ``python``: its interpreter, None: the first one there that has what is needed. ``directory``:
    where it keeps what is copied, None: ``~/.cache/spike-replay``. ``output``: a directory here
    for what the run printed and told. ``earlier``: keys of results that were kept here already.
    """

    ssh: str
    python: str | None = None
    directory: str | None = None
    output: Path | None = None
    earlier: frozenset[str] = field(default=frozenset(), repr=False)


def key_of(plain: Mapping[str, Any]) -> str:
    """Tells a result, given as its ``as_json()``, from all others: its time is in it."""
    return json.dumps(plain, sort_keys=True)


def replay(
    remote: Remote,
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    *,
    tell: Tell,
    keep: Keep,
) -> Replayed:
    """As ``replay_lib.run.replay_case``."""
    asked = _Asked("replay", (case,), options, tuple(experiments))
    answer = _perform(remote, asked, tell, lambda one, _under: keep(one))
    assert isinstance(answer, Replayed)
    return answer


def sweep(
    remote: Remote,
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    *,
    budget: int,
    known: Sequence[Result],
    tell: Tell,
    keep: Keep,
) -> Swept:
    """As ``replay_lib.sweep.sweeping.sweep``; ``known`` are the results that its file holds."""
    asked = _Asked("sweep", (case,), options, tuple(experiments))
    earlier = tuple(told.result_document(one) for one in known)
    more = {"budget": budget, "earlier": earlier}
    answer = _perform(remote, asked, tell, lambda one, _under: keep(one), more)
    assert isinstance(answer, Swept)
    return answer


def guard(
    remote: Remote,
    cases: Sequence[Case],
    labels: Sequence[str],
    options: ReplayOptions,
    *,
    reference: Reference,
    tell: Tell,
    keep: KeepUnder,
) -> Guarded:
    """As ``replay_lib.guard.guarding.guard``."""
    asked = _Asked("guard", tuple(cases), options, labels=tuple(labels), reference=reference)
    answer = _perform(remote, asked, tell, lambda one, under: keep(one, under or ""))
    assert isinstance(answer, Guarded)
    return answer


@dataclass(frozen=True)
class _Asked:
    operation: Any
    cases: tuple[Case, ...]
    options: ReplayOptions
    experiments: tuple[Experiment, ...] = ()
    labels: tuple[str, ...] = ()
    reference: Reference | None = None

    @property
    def trainers(self) -> list[str]:
        """Names of trainers that are modules of the user."""
        theirs = self.reference.trainer if self.reference else None
        named = [name for name in (self.options.trainer, theirs) if name]
        return [name for name in named if name not in (GRPO, AXRL)]

    @property
    def modules(self) -> set[str]:
        """Modules that trainers and methods are named by."""
        calls = [c.slug for e in self.experiments for c in (*e.mitigations, *e.against)]
        for label in self.labels:
            calls += [call.slug for call in Experiment.parse(label).mitigations]
        return {name.partition(":")[0] for name in (*self.trainers, *calls) if ":" in name}


def _perform(
    remote: Remote,
    asked: _Asked,
    tell: Tell,
    keep: Callable[[Result | Refusal, str | None], None],
    more: dict[str, Any] | None = None,
) -> told.Answer:
    if asked.options.nodes is not None:
        raise UsageError(
            "--ssh: found --nnodes too, expected one of them: the machines of one replay join each "
            "other, so start it on one of them"
        )
    for case in asked.cases:
        case.require()
    for name in {asked.options.trainer} & set(asked.trainers):
        check_findable(str(name))
    node = Node.parse(remote.ssh)

    def doing(what: str) -> None:
        tell(Step(asked.cases[0].name, what, 0, len(asked.experiments) + 1))

    doing("looking at the node")
    facts = probe(node, remote.python, remote.directory)
    run = _prepared(node, facts, asked, doing, more or {})
    return _followed(run, remote, tell, keep)


def _prepared(
    node: Node, facts: Facts, asked: _Asked, doing: Callable[[str], None], more: dict[str, Any]
) -> Run:
    """Everything the run needs, on the node."""
    theirs = asked.reference.path if asked.reference else ()
    trainer = asked.reference.trainer if asked.reference else ""
    own = own_parcel(asked.modules, asked.options.mitigations, theirs, trainer)
    parcels = [case_parcel(case) for case in asked.cases]
    with tempfile.TemporaryDirectory(prefix="remote-") as scratch:
        library = library_parcel(Path(scratch))
        wanted = [library, *([own.parcel] if own.parcel else []), *parcels]
        send(node, facts, list({p.place: p for p in wanted}.values()), doing)
    for case, parcel in zip(asked.cases, parcels, strict=True):
        if case_parcel(case).place != parcel.place:
            raise SnapshotError(
                f"{case.snapshot}: its files changed while they were copied to the node. Preserve "
                "it first, and replay the copy"
            )
    doing("starting the run there, or attaching to it")
    job = _job(facts, asked, own=own, parcels=parcels, library=library, more=more)
    return Run(node, facts, job)


def _path(facts: Facts, library: Parcel, own: Own) -> tuple[str, ...]:
    return tuple(f"{facts.directory}/{place}" for place in (library.place, *own.path))


def _job(
    facts: Facts,
    asked: _Asked,
    *,
    own: Own,
    parcels: Sequence[Parcel],
    library: Parcel,
    more: dict[str, Any],
) -> told.Job:
    def at(places: Iterable[str]) -> tuple[Path, ...]:
        return tuple(Path(facts.directory) / place for place in places)

    options = dataclasses.replace(asked.options, mitigations=at(own.mitigations))
    reference = None
    if asked.reference is not None:
        reference = {
            "told": asked.reference.told,
            "trainer": asked.reference.trainer,
            "path": [str(place) for place in at(own.reference)],
        }
    return told.Job(
        operation=asked.operation,
        python=facts.python,
        cases=tuple(
            there(case, f"{facts.directory}/{parcel.place}")
            for case, parcel in zip(asked.cases, parcels, strict=True)
        ),
        options=told.options_document(options),
        path=_path(facts, library, own),
        experiments=asked.experiments,
        labels=asked.labels,
        reference=reference,
        **more,
    )


def _followed(
    run: Run,
    remote: Remote,
    tell: Tell,
    keep: Callable[[Result | Refusal, str | None], None],
) -> told.Answer:
    """What the run came to; its end was brought here and it is gone from the node.

    An interrupt here ends it there. After any other error it goes on: the command can be repeated.
    """
    try:
        last = _heard(run, remote, tell, keep)
    except Exception:
        raise
    except BaseException:
        run.stop()
        raise
    if remote.output is not None:
        (remote.output / "node.log").write_bytes(run.log())
    if last["event"] == "error":
        run.clean()
        raise told.error_from(last)
    answer = told.answer_from(last)
    try:
        run.clean()
    except NodeError as error:  # it is there and whole: what is left costs some kilobytes
        tell(Step(run.job.cases[0].name, str(error), 0, 1))
    return answer


def _heard(
    run: Run,
    remote: Remote,
    tell: Tell,
    keep: Callable[[Result | Refusal, str | None], None],
) -> told.Document:
    """The last event, after all others were passed on."""
    seen = set(remote.earlier)
    events = remote.output / "node-events.jsonl" if remote.output else None
    last: told.Document = {}
    for last in run.follow(events):
        if last["event"] == "step":
            tell(Step(last["case"], last["what"], last["done"], last["total"]))
        elif last["event"] in ("result", "refused"):
            one, under = told.kept_from(last), last.get("under")
            key = key_of(one.as_json()) if isinstance(one, Result) else f"{under} {one}"
            if key not in seen:
                keep(one, under)
            seen.add(key)
    return last
