"""``results.jsonl``: one result a line, strict JSON; a killed writer leaves the old file whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import ValidationError

from replay_lib.errors import UsageError, fault
from replay_lib.record.result import Result
from replay_lib.writing import replace_file

_DERIVED = ("comparison", "status", "red", "quiet_fault")
LOCK_SECONDS = 60  # an append takes milliseconds; a minute of waiting means a stuck writer


def append_results(path: str | Path, results: Sequence[Result]) -> None:
    """Add ``results`` to the end of ``path``, which is created where it is absent."""
    file = Path(path)
    with _locked(file):
        before = file.read_bytes() if file.exists() else b""
        if before and not before.endswith(b"\n"):
            raise UsageError(
                fault(file, "last line", "no newline at its end", "whole lines of JSON")
            )
        replace_file(file, before + _lines(results))


def write_results(path: str | Path, results: Sequence[Result]) -> None:
    """Put ``results`` in place of whatever ``path`` held."""
    file = Path(path)
    with _locked(file):
        replace_file(file, _lines(results))


def read_results(path: str | Path) -> list[Result]:
    """All results of ``path``; an error names the line that is not one."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(fault(file, None, "no such file", "a results.jsonl"))
    lines = file.read_text(encoding="utf-8").splitlines()
    return [_parse(file, number, line) for number, line in enumerate(lines, start=1)]


def _lines(results: Sequence[Result]) -> bytes:
    text = "".join(json.dumps(r.as_json(), allow_nan=False) + "\n" for r in results)
    return text.encode("utf-8")


def _parse(file: Path, number: int, line: str) -> Result:
    where = f"line {number}"
    try:
        raw: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(fault(file, where, str(error), "one result as JSON")) from error
    if not isinstance(raw, dict):
        raise UsageError(fault(file, where, type(raw).__name__, "one result as JSON"))
    try:
        return Result.model_validate({k: v for k, v in raw.items() if k not in _DERIVED})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        told = f"{error.error_count()} faults, the first at {field}: {first['msg']}"
        raise UsageError(fault(file, where, told, "one result")) from error


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_SECONDS):
        yield
