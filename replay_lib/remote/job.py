"""What a node is asked to do, and what it tells: plain JSON, one document a line.

A run's name follows from everything that decides its results, so the same command finds it again.

=========== ====================================================================================
event       data
=========== ====================================================================================
``machine`` what ``doctor`` tells of the node
``step``    case, what, done, total
``result``  one result; ``under``: its trainer, where a command runs two
``refused`` case, experiment, error; ``under``
``value``   the whole of what the command came to; the last event
``error``   code and message: what ended it; the last event
=========== ====================================================================================
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment, Frozen
from replay_lib.errors import NodeError, SpikeReplayError
from replay_lib.guard.compare import Pair
from replay_lib.guard.gradients import Difference
from replay_lib.guard.guarding import Guarded
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.run import Replayed, ReplayOptions
from replay_lib.sweep.pareto import front_of_results
from replay_lib.sweep.sweeping import Swept

LAST = ("value", "error")
Document = dict[str, Any]
Answer = Replayed | Swept | Guarded


class Job(Frozen):
    """One command for a node; paths are the node's.

    ``earlier`` are results that a sweep may take over. They decide how long it takes, not what
    comes out, so they are no part of the run's name.
    """

    schema_version: Literal[1] = 1
    operation: Literal["replay", "sweep", "guard"]
    python: str
    cases: tuple[Case, ...]
    options: Document
    path: tuple[str, ...]
    experiments: tuple[Experiment, ...] = ()
    budget: int | None = None
    labels: tuple[str, ...] = ()
    reference: Document | None = None
    earlier: tuple[Document, ...] = Field(default=())

    @property
    def name(self) -> str:
        """The run's name."""
        told = self.model_dump(mode="json", exclude={"earlier"})
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]


def options_document(options: ReplayOptions) -> Document:
    """``options`` as plain data."""
    fields = [field.name for field in dataclasses.fields(options) if field.name != "nodes"]
    plain = {name: getattr(options, name) for name in fields}
    for name in ("mitigations", "trainer_path"):
        plain[name] = [str(path) for path in plain[name]]
    return plain | {"paths_from": None if options.paths_from is None else str(options.paths_from)}


def options_from(told: Mapping[str, Any]) -> ReplayOptions:
    """The options that :func:`options_document` wrote."""
    given = dict(told)
    for name in ("mitigations", "trainer_path"):
        given[name] = tuple(Path(path) for path in given[name])
    given["dp_ranks"] = None if given["dp_ranks"] is None else tuple(given["dp_ranks"])
    given["paths_from"] = None if given["paths_from"] is None else Path(given["paths_from"])
    return ReplayOptions(**given)


def result_document(result: Result) -> Document:
    """A result as plain data, without what follows from it."""
    plain: Document = json.loads(result.model_dump_json())
    return plain


def error_document(error: SpikeReplayError) -> Document:
    """Code and message."""
    return {"code": error.code, "message": str(error)}


def error_from(told: Mapping[str, Any]) -> Exception:
    """The error that happened on the node, of its own class."""
    kinds = {kind.code: kind for kind in _kinds(SpikeReplayError)}
    if told["code"] in kinds:
        return kinds[told["code"]](told["message"])
    if told["code"] == "internal":
        return RuntimeError(f"on the node: {told['message']}")
    return NodeError(f"the run on the node was ended: {told['message']}")


def _kinds(base: type[SpikeReplayError]) -> Iterator[type[SpikeReplayError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def kept_document(one: Result | Refusal, under: str | None) -> Document:
    """The event of a result or a refused experiment."""
    beside = {} if under is None else {"under": under}
    if isinstance(one, Result):
        return {"event": "result", "result": result_document(one), **beside}
    return {"event": "refused", **_refusal_document(one), **beside}


def kept_from(told: Mapping[str, Any]) -> Result | Refusal:
    """What :func:`kept_document` wrote."""
    if told["event"] == "result":
        return Result.model_validate(told["result"])
    return _refusal_from(told)


def _refusal_document(one: Refusal) -> Document:
    return {"case": one.case, "experiment": one.experiment, "error": error_document(one.error)}


def _refusal_from(told: Mapping[str, Any]) -> Refusal:
    error = error_from(told["error"])
    assert isinstance(error, SpikeReplayError), "only an error of ours refuses one experiment"
    return Refusal(told["case"], told["experiment"], error)


def answer_document(answer: Answer) -> Document:
    """The last event of a run that came to an end."""
    told: Document
    if isinstance(answer, Guarded):
        told = {
            "trainer": answer.trainer,
            "reference": answer.reference,
            "pairs": [_pair_document(pair) for pair in answer.pairs],
            "results": [result_document(one) for one in answer.results],
        }
        return {"event": "value", "guarded": told}
    told = {
        "results": [result_document(one) for one in answer.results],
        "refused": [_refusal_document(one) for one in answer.refused],
    }
    if isinstance(answer, Replayed):
        return {"event": "value", "replayed": told}
    # the front follows from the results
    plain = {
        name: getattr(answer, name)
        for name in ("resumed", "budget", "untried", "pairs", "left", "skipped", "notes")
    }
    return {"event": "value", "swept": told | plain}


def answer_from(told: Mapping[str, Any]) -> Answer:
    """What :func:`answer_document` wrote."""
    if "guarded" in told:
        inside = told["guarded"]
        return Guarded(
            inside["trainer"],
            inside["reference"],
            tuple(_pair_from(pair) for pair in inside["pairs"]),
            tuple(Result.model_validate(one) for one in inside["results"]),
        )
    inside = told.get("replayed") or told["swept"]
    results = tuple(Result.model_validate(one) for one in inside["results"])
    refused = tuple(_refusal_from(one) for one in inside["refused"])
    if "replayed" in told:
        return Replayed(results, refused)
    return Swept(
        results=results,
        refused=refused,
        resumed=inside["resumed"],
        budget=inside["budget"],
        front=front_of_results(results),
        skipped=tuple((name, why) for name, why in inside["skipped"]),
        **{name: tuple(inside[name]) for name in ("untried", "pairs", "left", "notes")},
    )


def _pair_document(pair: Pair) -> Document:
    sides = {"reference": pair.reference, "tested": pair.tested}
    return {
        "case": pair.case,
        "experiment": pair.experiment,
        "difference": None if pair.difference is None else dataclasses.asdict(pair.difference),
    } | {
        name: {"result": result_document(side)}
        if isinstance(side, Result)
        else {"error": error_document(side)}
        for name, side in sides.items()
    }


def _pair_from(told: Mapping[str, Any]) -> Pair:
    measured = told["difference"]
    return Pair(
        told["case"],
        told["experiment"],
        _side_from(told["reference"]),
        _side_from(told["tested"]),
        None if measured is None else Difference(**measured),
    )


def _side_from(told: Mapping[str, Any]) -> Result | SpikeReplayError:
    if "result" in told:
        return Result.model_validate(told["result"])
    error = error_from(told["error"])
    assert isinstance(error, SpikeReplayError), "an error of ours stands for a result"
    return error
