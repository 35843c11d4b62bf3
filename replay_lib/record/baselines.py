"""Baselines of figures: what every method gave on a case in one environment, as one document.

``<case>/baselines/<environment>.json``, one method a line, sorted by name, so that a change is one
line of a diff. The verdicts that a case expects are in its ``case.yaml``; a baseline holds numbers,
and the verdict that came with them for a reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from replay_lib import layout
from replay_lib.engine.protocol import Frozen
from replay_lib.errors import CaseError, fault
from replay_lib.record.environment import Environment
from replay_lib.rule import Verdict

THEN = "Correct it, or delete the file and write it again (pytest --update-baselines)"


class Figures(Frozen):
    """Norms are L2 before clipping; ``None``: not measured.

    ``carried`` is the norm with carried old log-probabilities, ``quiet`` and ``quiet_carried`` are
    those of the quiet control, ``ratio`` is ``norm`` over the median norm. ``kept_*`` are shares of
    the signal that a method keeps (:class:`~replay_lib.engine.protocol.Retained`): a loss that goes
    wrong may leave a norm as it is where most of a method's tokens are masked. ``denominator`` is
    what the summed gradients were divided by.
    """

    norm: float
    carried: float | None = None
    quiet: float | None = None
    quiet_carried: float | None = None
    kept_tokens: float | None = None
    kept_advantage: float | None = None
    kept_dloss_dlogprob: float | None = None
    denominator: float | None = None
    ratio: float | None = None
    verdict: Verdict


class Past(Figures):
    """Figures that were replaced on the day ``until``; ``case_digest`` where that was another."""

    until: str
    case_digest: str | None = None


class Entry(Figures):
    """The figures of one method since the day ``since``, and all that was there before."""

    since: str
    history: tuple[Past, ...] = ()


class Document(Frozen):
    """The baselines of one case in one environment.

    ``deterministic``: replays were bit-equal when it was written. ``seconds`` is what the replays
    of all methods took then (their own time), from which cases are ordered and split.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    case_digest: str
    environment: Environment
    deterministic: bool
    seconds: float
    methods: dict[str, Entry]


def directory_of(case_file: Path) -> Path:
    """Where the baselines of the case with this ``case.yaml`` are."""
    return case_file.parent / layout.BASELINES


def file_of(case_file: Path, environment: Environment) -> Path:
    """The document's file; it need not exist."""
    return directory_of(case_file) / f"{environment.slug}.json"


def files_in(case_file: Path) -> list[Path]:
    """All documents of a case."""
    return sorted(directory_of(case_file).glob("*.json"))


def read_document(file: Path) -> Document | None:
    """The document in ``file``; None where there is none, CaseError where it is not one."""
    if not file.is_file():
        return None
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
        found = Document.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or None
        told = f"{error.error_count()} faults, the first: {first['msg']}"
        raise CaseError(fault(file, field, told, "a document of baselines", THEN)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CaseError(fault(file, None, str(error), "a document of baselines", THEN)) from error
    if f"{found.environment.slug}.json" != file.name:
        named = f"the environment of {found.environment.slug}.json"
        raise CaseError(fault(file, "environment", named, "the one that names the file", THEN))
    return found


def rendered(document: Document) -> str:
    """The text of a document: strict JSON, one method a line, sorted by name."""
    plain: dict[str, Any] = json.loads(document.model_dump_json(by_alias=True, exclude_none=True))
    methods = plain.pop("methods")
    head = json.dumps(plain, indent=1, sort_keys=True, allow_nan=False).removesuffix("\n}")
    # inside a line the order is the schema's: the figures first, what they were before last
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(_worth_a_line(methods[name]), allow_nan=False)}"
        for name in sorted(methods)
    )
    return f'{head},\n "methods": {{\n{lines}\n }}\n}}\n'


def _worth_a_line(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "history" or value}
