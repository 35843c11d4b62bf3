"""Whether a job's description fits its weights, and whether the engine would replay it.

Looked at once, before there is any snapshot, by what the engine and the doctor ask of one: names
and shapes alone. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.engine.field_values import wrong_values
from replay_lib.engine.fitting_fields import Guess, fitting_fields
from replay_lib.engine.model_config import missing_fields
from replay_lib.engine.parameters import Shape, Unlike, compare
from replay_lib.engine.refusals import Refusals, refusals_of
from replay_lib.errors import SnapshotError, UnsupportedModelError, fault
from replay_lib.snapshot.model import Parallel, WorkerConfig, worker_from
from replay_lib.snapshot.run_config import model_fields
from replay_lib.snapshot.stated import validated

_LAYER = "decoder.layers."
_LOOK = "`spike-replay doctor SNAPSHOT` compares the same in a snapshot"


@dataclass(frozen=True)
class Description:
    """What a snapshot will say of the network; ``stated``: the user wrote some of it."""

    worker_config: Mapping[str, Any]
    parallel: Parallel
    run_config: str
    stated: bool


@dataclass(frozen=True)
class Checked:
    """``wrong`` ends the run, ``remark`` is for its log; "" is nothing."""

    wrong: str = ""
    remark: str = ""


def check_description(described: Description, shapes: Mapping[str, Shape]) -> Checked:
    """The description against ``shapes``, the whole tensors by checkpoint key.

    What the user stated and the weights contradict is wrong. What was read off the live model is
    no user's mistake, and what the engine does not model may have parameters that are not known
    here: both are remarks.
    """
    try:
        fields = model_fields(described.run_config, Path(layout.RUN_CONFIG))
        source = Path(layout.WORKER_CONFIG)
        worker = validated(WorkerConfig, worker_from, described.worker_config, source)
    except SnapshotError as error:
        return Checked(str(error))
    told = _impossible(fields)
    if told:
        return Checked(told) if described.stated else Checked(remark=told)
    refused = refusals_of(worker, described.parallel, fields)
    remark = _refused(refused)
    try:
        unlike = compare(fields, shapes)
    except UnsupportedModelError:
        return Checked(remark=remark)
    if not unlike.count:
        return Checked(remark=remark)
    guess = fitting_fields(fields, shapes, unlike)
    told = _unlike(unlike, guess, fields)
    if described.stated and (not refused.model or not guess.left):
        return Checked(told)
    return Checked(remark="; ".join(filter(None, (remark, told))))


def _impossible(fields: Mapping[str, Any]) -> str:
    missing = missing_fields(fields)
    if missing:
        return fault("recorder", "fields", f"no {', '.join(missing)}", "all that have no default")
    wrong = wrong_values(fields)
    return f"recorder: fields: {'; '.join(wrong)}" if wrong else ""


def _refused(refused: Refusals) -> str:
    if not refused.all:
        return ""
    return (
        f"recorder: the replay's engine does not model {'; '.join(refused.all)}. "
        "Recording goes on; replay these snapshots with a backend that does"
    )


def _unlike(unlike: Unlike, guess: Guess, fields: Mapping[str, Any]) -> str:
    kinds = (
        ("missing in the weights: ", ((name, "") for name in unlike.missing)),
        ("extra in the weights: ", ((name, "") for name in unlike.unknown)),
        ("", ((one.name, f" {one.told}") for one in unlike.misshapen)),
    )
    found = "; ".join(head + ", ".join(names) for head, kind in kinds if (names := _joined(kind)))
    then = _advice(guess, fields)
    return fault("recorder", "fields", found, "the names and shapes of these fields", then)


def _joined(names: Iterable[tuple[str, str]]) -> list[str]:
    """Every name with what is told of it; of parameters that many layers have, once."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name, told in names:
        number, _, rest = name.removeprefix(_LAYER).partition(".")
        inside = name.startswith(_LAYER) and number.isdigit()
        same = layers.setdefault((rest if inside else name, told), [])
        same += [int(number)] if inside else []
    return [
        f"{_LAYER}{_spans(numbers)}.{name}{told}" if numbers else f"{name}{told}"
        for (name, told), numbers in layers.items()
    ]


def _spans(numbers: Iterable[int]) -> str:
    """``0``, or ``{0-3,5}`` as a shell has it but for the dash."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return texts[0] if len(spans) == 1 and "-" not in texts[0] else f"{{{','.join(texts)}}}"


def _advice(guess: Guess, fields: Mapping[str, Any]) -> str:
    changes = [
        f"{name}={value!r} instead of {_said(name, fields)}"
        for name, value in guess.changes.items()
    ]
    if not changes:
        return f"No single field explains it: look at names and fields. {_LOOK}."
    rest = f" and leave {guess.left} of them; look at names, too" if guess.left else ""
    would = "would explain it" if not guess.left else "would explain some"
    return f"{', '.join(changes)} {would}{rest}. {_LOOK}."


def _said(name: str, fields: Mapping[str, Any]) -> str:
    return repr(fields[name]) if fields.get(name) is not None else "nothing"
