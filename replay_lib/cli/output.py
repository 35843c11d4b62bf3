"""What goes where: results to stdout, progress and errors to stderr, JSON alone on stdout."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from replay_lib.errors import SpikeReplayError
from replay_lib.run import Step, Tell


def stdout() -> Console:
    """The console for results; wide where it is no terminal, so that no table is folded."""
    width = None if sys.stdout.isatty() else 160
    return _plain(sys.stdout, width)


def stderr() -> Console:
    """The console for progress and errors."""
    return _plain(sys.stderr)


def _plain(file: TextIO, width: int | None = None) -> Console:
    """A console that shows text as it is: paths and reasons may hold ``:x:`` and ``[...]``."""
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def print_json(document: Mapping[str, Any]) -> None:
    """One document of strict JSON on stdout."""
    sys.stdout.write(json.dumps(document, allow_nan=False, indent=1, ensure_ascii=False) + "\n")


def error_document(error: SpikeReplayError | None) -> dict[str, Any]:
    """The ``error`` of a document that has everything else too; nothing without one."""
    return {"error": {"code": error.code, "message": str(error)}} if error else {}


def print_error(code: str, message: str, *, as_json: bool) -> None:
    """An error: a JSON document on stdout where JSON was asked for, else a line on stderr."""
    if as_json:
        print_json({"error": {"code": code, "message": message}})
    else:
        stderr().print(f"error ({code}): {message}", style="red", markup=False, soft_wrap=True)


def key_value_table(values: Mapping[str, Any]) -> Table:
    """Two columns without a frame."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, "-" if value is None else str(value))
    return table


@contextlib.contextmanager
def progress() -> Iterator[Tell]:
    """A bar on stderr; where that is no terminal, one line a step with the seconds so far."""
    console = stderr()
    if not console.is_terminal:
        yield _lines(console, time.monotonic())
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[case]}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def tell(step: Step) -> None:
            if step.case not in tasks:
                tasks[step.case] = bar.add_task(step.what, total=step.total, case=step.case)
            bar.update(
                tasks[step.case], completed=step.done, total=step.total, description=step.what
            )

        yield tell


def _lines(console: Console, started: float) -> Tell:
    def tell(step: Step) -> None:
        seconds = time.monotonic() - started
        line = f"[{seconds:6.1f} s] {step.case} {step.done}/{step.total} {step.what}"
        console.print(line, markup=False, soft_wrap=True)

    return tell
