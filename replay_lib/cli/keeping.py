"""How commands that run experiments keep themselves in the ledger of a task."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import typer

from replay_lib.case import Case
from replay_lib.cli.output import print_error, stderr
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import PatchError, SpikeReplayError
from replay_lib.layout import CASE_FILE
from replay_lib.record.keeping import PRINTED, Kept, keep_command, snapshot_at, task_of
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result


@dataclass(frozen=True)
class Call:
    """A command as it was called: on ``path``, with what ``--task`` says."""

    context: typer.Context
    task: str | None
    path: Path

    @property
    def line(self) -> str:
        """The command line, to be copied into a shell."""
        return command_line(self.context)


def command_line(context: typer.Context) -> str:
    """The command line of ``context``, to be copied into a shell."""
    given = context.obj if isinstance(context.obj, list) else sys.argv[1:]
    return shlex.join(["spike-replay", *given])


@contextlib.contextmanager
def keeping(call: Call, methods: Sequence[str] | None) -> Iterator[Kept]:
    """Keep a command that replays ``methods`` on one snapshot or case; None: it replays nothing.

    Without a task nothing is kept, and for a snapshot that is no case's this is told at the end.
    """
    task = task_of(call.path, call.task)
    if task is None:
        yield Kept(None)
        _nag(call.path)
        return
    names = [] if methods is None else planned(methods)
    with keep_printed(keep_command(task, call.line, [_snapshot(call.path)], names)) as kept:
        yield kept


@contextlib.contextmanager
def keeping_cases(
    context: typer.Context, named: str | None, cases: Sequence[tuple[Case, Sequence[str]]]
) -> Iterator[Keeps]:
    """Keep a command that replays several cases, each with methods, in each one's own task."""
    tasks = [task_of(case.file or case.snapshot, named) for case, _ in cases]
    keeps: dict[str, Kept] = {}
    with contextlib.ExitStack() as stack:
        for task in dict.fromkeys(filter(None, tasks)):
            mine = [one for one, its in zip(cases, tasks, strict=True) if its == task]
            names = [name for _, methods in mine for name in planned(methods)]
            snapshots = [case.snapshot for case, _ in mine]
            one = keep_command(task, command_line(context), snapshots, list(dict.fromkeys(names)))
            kept = stack.enter_context(keep_printed(one))
            keeps |= {case.name: kept for case, _ in mine}
        yield Keeps(keeps)


@dataclass(frozen=True)
class Keeps:
    """What is kept of each case, by the case's name; of a case without a task nothing."""

    by_case: dict[str, Kept]

    def keep(self, one: Result | Refusal, under: str) -> None:
        """Keep a result or a refusal in its case's task."""
        if one.case in self.by_case:
            self.by_case[one.case].keep(one, under)

    def retry(self) -> SpikeReplayError | None:
        """As of :class:`Kept`; the first error of them."""
        return next(filter(None, [kept.retry() for kept in self._each]), None)

    def end(self, exit_code: int) -> None:
        """State how the command ends."""
        for kept in self._each:
            kept.exit_code = exit_code

    def status(self, exit_code: int) -> int:
        """The exit code, once everything is written."""
        return next((kept.status for kept in self._each if kept.lost), exit_code)

    @property
    def _each(self) -> list[Kept]:
        return list({id(kept): kept for kept in self.by_case.values()}.values())


@contextlib.contextmanager
def keep_printed(keeping: contextlib.AbstractContextManager[Kept]) -> Iterator[Kept]:
    """``keeping``, with what is printed on stdout meanwhile; at the end it is told where all is."""
    kept: Kept | None = None
    try:
        with keeping as kept:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(cast(TextIO, _Both(sys.stdout, printed))):
                    yield kept
            finally:
                kept.write(PRINTED, printed.getvalue())
    finally:
        if kept is not None:
            _tell(kept)


class _Both:
    """A stream that is shown, and kept."""

    def __init__(self, shown: TextIO, kept: TextIO) -> None:
        self._shown = shown
        self._kept = kept

    def write(self, text: str) -> int:
        self._kept.write(text)
        return self._shown.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


def planned(methods: Sequence[str]) -> list[str]:
    """Names of the experiments that ``methods`` ask for, the baseline first."""
    return list(dict.fromkeys(["baseline", *map(_name, methods)]))


def _name(text: str) -> str:
    try:
        return Experiment.parse(text).name
    except PatchError:
        return text  # told when it is looked up


def _snapshot(path: Path) -> Path:
    """What is replayed; of a broken case its path, which is told later."""
    try:
        return snapshot_at(path)
    except SpikeReplayError:
        return path.absolute()


def _nag(path: Path) -> None:
    is_case = path.name == CASE_FILE or (path / CASE_FILE).is_file()
    if path.is_dir() and not is_case:
        told = f"not kept in a ledger: {path} names no job; name a task with --task JOB"
        stderr().print(told, soft_wrap=True)


def _tell(kept: Kept) -> None:
    assert kept.task is not None
    console = stderr()
    for line in kept.told:
        console.print(line, soft_wrap=True)
    if kept.lost is not None:
        print_error(kept.lost.code, str(kept.lost), as_json=False)
    console.print(f"kept in {kept.task.file}; output: {kept.output}", soft_wrap=True)
