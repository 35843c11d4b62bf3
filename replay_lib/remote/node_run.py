"""Runs on the node, detached: ``python -m replay_lib.remote.node_run DIRECTORY``.

It reads ``job.json`` there and appends what happens to ``events.jsonl``. Whoever holds the lock is
the run; a second one ends at once. Results that an earlier process of the same run left (it was
killed, the node went down) are not replayed again, as long as the baseline comes out as it did.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from replay_lib.analysis import describe_environment
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import SpikeReplayError
from replay_lib.guard.guarding import guard
from replay_lib.guard.reference import Reference
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.record.results_file import write_results
from replay_lib.remote import job as told
from replay_lib.remote.node_files import EVENTS, JOB, LOCK, RESULTS
from replay_lib.run import Replayed, ReplayOptions, Step, replay_case
from replay_lib.sweep.earlier import same_step
from replay_lib.sweep.sweeping import BUDGET, sweep

Write = Callable[[told.Document], None]


class Ended(BaseException):
    """SIGTERM: the worker is closed on the way out."""


def main(directory: Path) -> int:
    """Run the job in ``directory``; its exit status tells nothing, the events do."""
    with (directory / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _end)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        before = _events_so_far(directory / EVENTS)
        if any(event["event"] in told.LAST for event in before):
            return 0
        handle = os.open(directory / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            _run(directory, before, lambda event: _write(handle, event))
        finally:
            os.close(handle)
    return 0


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the clearing short
    raise Ended


def _events_so_far(file: Path) -> list[told.Document]:
    """What an earlier process wrote, whole lines."""
    content = file.read_bytes() if file.exists() else b""
    return [json.loads(line) for line in content.splitlines()]


def _write(handle: int, event: told.Document) -> None:
    left = memoryview((json.dumps(event) + "\n").encode())
    while left:
        left = left[os.write(handle, left) :]


def _run(directory: Path, before: list[told.Document], write: Write) -> None:
    try:
        given = told.Job.model_validate_json((directory / JOB).read_bytes())
        write({"event": "machine", "machine": describe_environment()})
        answer = _perform(given, directory, before, write)
        write(told.answer_document(answer))
    except SpikeReplayError as error:
        write({"event": "error", **told.error_document(error)})
    except Ended:
        write({"event": "error", "code": "terminated", "message": "by SIGTERM"})
    except Exception as error:
        write({"event": "error", "code": "internal", "message": f"{type(error).__name__}: {error}"})
        raise  # the log has the rest


def _perform(
    given: told.Job, directory: Path, before: list[told.Document], write: Write
) -> told.Answer:
    options = told.options_from(given.options)

    def tell(step: Step) -> None:
        data: dict[str, Any] = {"case": step.case, "what": step.what}
        write({"event": "step", **data, "done": step.done, "total": step.total})

    def keep(one: Result | Refusal, under: str | None = None) -> None:
        write(told.kept_document(one, under))

    if given.operation == "guard":
        assert given.reference is not None, "a guard has a reference"
        path = tuple(Path(place) for place in given.reference["path"])
        reference = Reference(given.reference["told"], given.reference["trainer"], path)
        return guard(given.cases, given.labels, options, reference, tell, keep=keep)
    (case,) = given.cases
    if given.operation == "sweep":
        known = [Result.model_validate(one) for one in given.earlier]
        if not (directory / RESULTS).exists():
            write_results(directory / RESULTS, known)
        return sweep(
            case,
            given.experiments,
            options,
            budget=given.budget or BUDGET,
            file=directory / RESULTS,
            tell=tell,
            keep=keep,
        )
    left = [one for one in map(told.kept_from, _kept(before)) if isinstance(one, Result)]
    return _replay(case, list(given.experiments), options, left, tell=tell, keep=keep)


def _kept(events: list[told.Document]) -> list[told.Document]:
    return [event for event in events if event["event"] == "result"]


def _replay(
    case: Case,
    experiments: list[Experiment],
    options: ReplayOptions,
    left: list[Result],
    *,
    tell: Callable[[Step], None],
    keep: Callable[[Result | Refusal], None],
) -> Replayed:
    """Replay what ``left`` has no result of; all of it where the baseline is another one now."""
    known = {result.experiment: result for result in left}
    before = known.get(Experiment.baseline().name)
    rest = [one for one in experiments if before is None or one.name not in known]

    def new(one: Result | Refusal) -> None:
        if before is None or one.experiment != before.experiment:
            keep(one)

    replayed = replay_case(case, rest, options, tell, keep=new)
    if before is None:
        return replayed
    if not same_step(before, replayed.results[0]):
        return replay_case(case, experiments, options, tell, keep=keep)
    found = {r.experiment: r for r in replayed.results} | known
    order = [Experiment.baseline().name, *(e.name for e in experiments if e.mitigations)]
    return Replayed(tuple(found[name] for name in order if name in found), replayed.refused)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
