"""What a pytest run keeps in the ledgers of its cases' tasks. No torch at import.

Each process of pytest-xdist keeps the cases that it replays; a ledger takes many writers.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence

import pytest

from replay_lib.case import Case
from replay_lib.errors import SpikeReplayError
from replay_lib.exit_codes import ExitCode
from replay_lib.record.keeping import Kept, keep_command, task_of
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.record.task import Task
from replay_lib.run import Keep


def check_task(config: pytest.Config) -> None:
    """UsageError (ours) where ``--spike-task`` names what could be no task."""
    named = config.getoption("--spike-task")
    if named is not None:
        Task(named)


@contextlib.contextmanager
def keep_case(session: pytest.Session, case: Case, labels: Sequence[str]) -> Iterator[Keep]:
    """Keep the replays of ``case`` under ``labels`` as one command, if it belongs to a task.

    A ledger that cannot be written fails the test that began, or ends, the case.
    """
    red: list[bool] = []
    failed = ""
    try:
        with _kept(session, case, labels) as kept:

            def keep(one: Result | Refusal) -> None:
                kept.keep(one)
                red.append(isinstance(one, Refusal) or one.red)

            yield keep
            if session.exitstatus == pytest.ExitCode.INTERRUPTED:
                kept.failure(KeyboardInterrupt())
                kept.exit_code = ExitCode.INTERRUPTED
            else:
                kept.exit_code = int(any(red))
        failed = "; ".join(filter(None, [*kept.told, str(kept.lost or "")]))
    except SpikeReplayError as error:
        failed = str(error)
    if failed:  # outside the handler, so that the report tells it once
        pytest.fail(failed, pytrace=False)


@contextlib.contextmanager
def _kept(session: pytest.Session, case: Case, labels: Sequence[str]) -> Iterator[Kept]:
    task = task_of(case.file or case.snapshot, session.config.getoption("--spike-task"))
    if task is None:
        yield Kept(None)
        return
    names = list(dict.fromkeys(["baseline", *labels]))
    with keep_command(task, _command_line(session.config), [case.snapshot], names) as kept:
        yield kept


def _command_line(config: pytest.Config) -> str:
    """As the user called pytest; a worker of xdist is told it by the process that he called."""
    main = getattr(config, "workerinput", {}).get("mainargv")
    given = main[1:] if main else config.invocation_params.args
    return shlex.join(["pytest", *map(str, given)])
