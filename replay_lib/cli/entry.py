"""Where the console script begins and how it ends: one text (or JSON) and an exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from replay_lib.cli.commands import app
from replay_lib.cli.output import print_error, stderr
from replay_lib.engine.meeting import part
from replay_lib.errors import SpikeReplayError, UsageError, not_allowed
from replay_lib.exit_codes import ExitCode
from replay_lib.record.task_file import render_stale

#: What typer raises for a wrong command line; found by name, since newer typer has its own click.
CommandFault: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class Terminated(BaseException):
    """SIGTERM: whatever is open is closed on the way out, as after an interrupt."""

    code = "terminated"
    exit_code = ExitCode.TERMINATED


def main(arguments: list[str] | None = None) -> None:
    """Entry of the console script: every error becomes one text (or JSON) and an exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    # as python -m does: module:function may lie where the command is called
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with _orderly_end():
        try:
            code = _run(given, as_json="--json" in given)
        finally:
            part()
        _render_task_files()
    sys.exit(code)


def _render_task_files() -> None:
    """Those that are older than their ledgers, after whatever command it was.

    What goes wrong here changes no exit status: the command has done what it was asked.
    """
    try:
        for line in render_stale():
            stderr().print(line, soft_wrap=True)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        told = f"task files were not rendered ({type(error).__name__}: {error})"
        stderr().print(f"{told}: spike-replay task render JOB", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM raises Terminated here, so that temporary files go and the worker is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the clearing short
    raise Terminated("ended by SIGTERM; nothing half-written is left")


def _run(arguments: list[str], *, as_json: bool) -> int:
    try:
        code: Any = app(
            args=arguments, prog_name="spike-replay", standalone_mode=False, obj=arguments
        )
    except (SpikeReplayError, PermissionError) as error:
        ours = not_allowed(error) if isinstance(error, PermissionError) else error
        print_error(ours.code, str(ours), as_json=as_json)
        return ours.exit_code
    except CommandFault as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help text
            sys.stderr.write(f"{error}\n")
        else:
            # str() of a value that cannot be read leaves out which option it was given to
            told = getattr(error, "format_message", error.__str__)()
            print_error(UsageError.code, told, as_json=as_json)
        return ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted", "interrupted from the keyboard", as_json=as_json)
        return ExitCode.INTERRUPTED
    except Terminated as error:
        print_error(error.code, str(error), as_json=as_json)
        return error.exit_code
    except Exception as error:
        if as_json:
            print_error("internal", f"{type(error).__name__}: {error}", as_json=True)
        else:
            traceback.print_exc()  # Python's own exit status would read as a red verdict
        return ExitCode.INTERNAL
    if code == ExitCode.INTERRUPTED:  # what typer makes of an interrupt inside a command
        print_error("interrupted", "interrupted from the keyboard", as_json=as_json)
    return int(code or 0)
