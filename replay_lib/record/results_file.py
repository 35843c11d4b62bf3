"""``results.jsonl``: one result a line, strict JSON; a killed writer leaves the old file whole."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from replay_lib.errors import UsageError, fault
from replay_lib.record.result import Result
from replay_lib.writing import replace_file

_DERIVED = ("comparison", "status", "red", "quiet_fault")
LOCK_SECONDS = 60  # an append takes milliseconds; a minute of waiting means a stuck writer


def append_results(path: str | Path, results: Sequence[Result]) -> None:
    """Add ``results`` to the end of ``path``, which is created where it is absent.

    Raises UsageError where ``path`` is no regular file, ends in a torn line, is locked by another
    writer for a minute, or cannot be written.
    """
    append_lines(path, _plain(results))


def append_lines(path: str | Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Add each of ``documents`` as a line of JSON; errors as in :func:`append_results`."""
    file = Path(path)
    with _locked(file):
        replace_file(file, _present(file) + _lines(documents))


def write_results(path: str | Path, results: Sequence[Result]) -> None:
    """Put ``results`` in place of whatever ``path`` held; UsageError where that is impossible."""
    write_lines(path, _plain(results))


def write_lines(path: str | Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Put ``documents`` in place of whatever ``path`` held; errors as in :func:`write_results`."""
    file = Path(path)
    with _locked(file):
        replace_file(file, _lines(documents))


def check_results_file(path: str | Path, *, append: bool = True) -> None:
    """UsageError where results could not be written to ``path``: told before hours of replay.

    Missing parent directories are created, the file is not; ``append`` also looks at what the
    file holds.
    """
    file = Path(path)
    with _locked(file), tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}."):
        if append:
            _present(file)


def read_results(path: str | Path) -> list[Result]:
    """All results of ``path``; an error names the line that is not one."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(fault(file, None, "no such file", "a results.jsonl"))
    return [_parse(file, number, line) for number, line in enumerate(lines_of(file), start=1)]


def lines_of(file: Path) -> list[str]:
    """The lines of ``file``; UsageError where it cannot be read as text."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(fault(file, None, str(error), "lines of JSON in UTF-8")) from error


def result_from(plain: Mapping[str, Any]) -> Result:
    """The result whose ``as_json()`` is ``plain``; pydantic's ValidationError if it is none's."""
    return Result.model_validate({k: v for k, v in plain.items() if k not in _DERIVED})


def _present(file: Path) -> bytes:
    """What is in ``file`` so far: whole lines."""
    content = file.read_bytes() if file.exists() else b""
    if content and not content.endswith(b"\n"):
        raise UsageError(fault(file, "last line", "no newline at its end", "whole lines of JSON"))
    return content


def _plain(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [result.as_json() for result in results]


def _lines(documents: Iterable[Mapping[str, Any]]) -> bytes:
    text = "".join(json.dumps(one, allow_nan=False) + "\n" for one in documents)
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
        return result_from(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        told = f"{error.error_count()} faults, the first at {field}: {first['msg']}"
        raise UsageError(fault(file, where, told, "one result")) from error


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of ``file``; what the system refuses becomes a UsageError."""
    try:
        _refuse_what_is_no_file(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise UsageError(
            fault(
                file,
                None,
                f"its lock {error.lock_file} held for {LOCK_SECONDS} s",
                "no other writer",
            )
        ) from error
    except OSError as error:
        told = error.strerror or str(error)
        raise UsageError(fault(file, None, repr(told), "a file that can be written")) from error


def _refuse_what_is_no_file(file: Path) -> None:
    if file.is_dir():
        raise UsageError(fault(file, None, "a directory", "a file for the results"))
    above = next(place for place in file.parents if place.exists())
    if not above.is_dir():
        raise UsageError(fault(file, None, f"no directory at {above}", "a file for the results"))
    # a device or a pipe may have no end
    if file.exists() and not file.is_file():
        raise UsageError(fault(file, None, "no regular file", "a file for the results"))
