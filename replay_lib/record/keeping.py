"""Which task a command belongs to, and what is kept of it in the task's ledger while it runs."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.case import Case
from replay_lib.errors import SnapshotError, SpikeReplayError, UsageError, fault, not_allowed
from replay_lib.exit_codes import ExitCode
from replay_lib.record import ledger
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.record.results_file import append_results
from replay_lib.record.task import Task
from replay_lib.record.task_file import render
from replay_lib.writing import replace_file

PRINTED, ERROR = "printed.txt", "error.txt"  # in a command's output, beside its results


def task_of(path: str | Path, named: str | None, root: Path = Path()) -> Task | None:
    """The task that a command on ``path`` (a snapshot or a case) belongs to; None: none is named.

    ``named`` is what the user says. Else the job in the manifest of the preserved snapshot, else
    the job in the name of the output directory above it. A case is its snapshot; links are
    followed. CaseError for a broken ``case.yaml``, SnapshotError for a broken manifest, UsageError
    for a name that could be no task's.
    """
    if named is not None:
        return Task(named, root)
    snapshot = snapshot_at(path)
    job = _job_in_manifest(snapshot)
    if job is None:
        places = (snapshot.resolve(), snapshot.absolute())
        job = next((found for place in places if (found := _job_above(place))), None)
    return None if job is None else Task(job, root)


def snapshot_at(path: str | Path) -> Path:
    """The snapshot that ``path`` is, or that the case at ``path`` refers to; it may be absent."""
    given = Path(path)
    if given.name == layout.CASE_FILE or (given / layout.CASE_FILE).is_file():
        return Case.load(given).snapshot
    return given.absolute()


def _job_in_manifest(snapshot: Path) -> str | None:
    """The field ``task`` of the manifest; None where there is no manifest, or it names none."""
    file = snapshot / layout.PRESERVED_MANIFEST
    try:
        raw: Any = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        found = f"what cannot be read ({str(error).splitlines()[0]:.80})"
        raise SnapshotError(fault(file, None, found, "a manifest in JSON", _NAME_IT)) from error
    job = raw.get("task") if isinstance(raw, dict) else None
    if job is None:
        return None
    if not isinstance(job, str) or not _could_be_task(job):
        raise SnapshotError(fault(file, "task", f"{job!r:.80}", "a job's name", _NAME_IT))
    return job


_NAME_IT = "Name the task with --task JOB"


def _job_above(snapshot: Path) -> str | None:
    """The job in the name of the output directory above ``snapshot``."""
    above = layout.output_directory(snapshot)
    named = layout.job_and_role(above.name) if above else None
    return named[0] if named and _could_be_task(named[0]) else None


def _could_be_task(job: str) -> bool:
    try:
        Task(job)
    except UsageError:
        return False
    return True


@dataclass
class Kept:
    """What one command keeps in its task's ledger; without a task nothing is kept.

    A ledger that cannot be written ends no replay: what it would not take is tried again with the
    next event and at the end, and ``lost`` is the error if that failed too.
    """

    task: Task | None
    run: str = field(default_factory=ledger.new_run)
    output: Path | None = None
    exit_code: int = 0
    lost: SpikeReplayError | None = None
    told: tuple[str, ...] = ()  # of the task file: what its reader has to know
    _waiting: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _unwritten: list[Result] = field(default_factory=list)

    def keep(self, one: Result | Refusal, under: str | None = None) -> None:
        """Keep a result or a refused experiment, on disk when this returns.

        ``under`` says which of two trainers it is of, where a command runs both.
        """
        beside = {} if under is None else {"under": under}
        if isinstance(one, Refusal):
            self.failure(one.error, f"{one.case} / {one.experiment}", **beside)
            return
        self._add("result", {"result": one.as_json(), **beside})
        self._unwritten.append(one)
        self._write_results()

    def complete(self, results: Sequence[Result]) -> None:
        """Keep those of ``results`` that the ledger has not got: an earlier run had them."""
        if self.task is None:
            return
        try:
            events = ledger.read(self.task)
        except SpikeReplayError as error:
            self.lost = self.lost or error
            return
        there = [event.data.get("result") for event in events if event.kind == "result"]
        for result in results:
            if result.as_json() not in there:
                self.keep(result)

    def analyzed(self, snapshot: str, signals: dict[str, Any]) -> None:
        """Keep what ``analyze`` found in ``snapshot``: its signals as strict JSON."""
        self._add("analyzed", {"snapshot": snapshot, "signals": signals})

    def failure(self, error: BaseException, experiment: str | None = None, **more: Any) -> None:
        """Keep a failure of ``experiment``, or of the whole command."""
        code, _, message = told(error)
        self._add("failure", {"experiment": experiment, "code": code, "message": message, **more})

    def started(self, command: str, snapshots: Sequence[Path], planned: Sequence[str]) -> None:
        """The first event; raises UsageError where the ledger cannot be written at all."""
        if self.task is None:
            return
        self.output = _new_output(self.task)
        ledger.append(
            self.task,
            "started",
            run=self.run,
            command=command,
            snapshot=str(snapshots[0]) if snapshots else None,
            snapshots=[str(one) for one in snapshots],
            planned=list(planned),
            output=str(self.output),
        )
        self.render()

    def ended(self, seconds: float) -> None:
        """The last event; then the task file is rendered."""
        self._add("ended", {"exit_code": int(self.status), "seconds": round(seconds, 3)})
        self._write_results()
        self.render()

    @property
    def status(self) -> int:
        """The exit code: an error of the ledger or of the task file comes first."""
        return self.exit_code if self.lost is None else self.lost.exit_code

    def retry(self) -> SpikeReplayError | None:
        """Try again to write what could not be written; what is still lost."""
        self._flush()
        self._write_results()
        return self.lost

    def render(self) -> None:
        """Write the task file anew."""
        if self.task is None:
            return
        try:
            self.told += render(self.task)
        except SpikeReplayError as error:
            self.lost = self.lost or error

    def write(self, name: str, text: str) -> None:
        """Keep ``text`` as a file of the command's output; nothing for an empty one."""
        if self.output is None or not text:
            return
        file = self.output / name
        try:
            replace_file(file, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            found = repr(error.strerror or str(error))
            lost = UsageError(fault(file, None, found, "a file that can be written"))
            self.lost = self.lost or lost

    def _add(self, kind: str, data: dict[str, Any]) -> None:
        """Append this event after what waits."""
        if self.task is None:
            return
        self._waiting.append((kind, data))
        self._flush()

    def _flush(self) -> None:
        if self.task is None:
            return
        try:
            while self._waiting:
                self._append(self.task, *self._waiting[0])
                self._waiting.pop(0)
        except SpikeReplayError as error:
            self.lost = error
        else:
            self.lost = None

    def _append(self, task: Task, kind: str, data: dict[str, Any]) -> None:
        try:
            ledger.append(task, kind, run=self.run, **data)
        except SpikeReplayError:
            raise
        except BaseException:  # an interrupt may come when the line is written: not a second time
            mine = [e for e in ledger.read(task) if e.run == self.run and e.kind == kind]
            if any(event.data == json.loads(json.dumps(data)) for event in mine):
                self._waiting.pop(0)
            raise

    def _write_results(self) -> None:
        if self.output is None or not self._unwritten:
            return
        try:
            append_results(self.output / layout.RESULTS, self._unwritten)
            self._unwritten.clear()
        except SpikeReplayError as error:
            self.lost = self.lost or error


@contextmanager
def keep_command(
    task: Task | None, command: str, snapshots: Sequence[Path], planned: Sequence[str]
) -> Iterator[Kept]:
    """Keep one command from its start to its end, however it ends.

    ``command`` is the command line, ``snapshots`` what it replays, ``planned`` the names of its
    experiments. Whoever runs them gives each result to ``keep`` as it arrives, and sets
    ``exit_code``. What is raised inside is kept as the failure of the whole command, and goes on.
    A killed command leaves ``started`` without ``ended``.
    """
    kept = Kept(task)
    began = time.monotonic()
    kept.started(command, snapshots, planned)
    try:
        yield kept
    except BaseException as error:
        code, kept.exit_code, message = told(error)
        kept.failure(error)
        kept.write(ERROR, f"error ({code}): {message}\n{_trace(error, code)}")
        raise
    finally:
        kept.ended(time.monotonic() - began)


def _new_output(task: Task) -> Path:
    try:
        return task.output()
    except OSError as error:
        where, found = error.filename or task.job, repr(error.strerror or str(error))
        raise UsageError(fault(where, None, found, "a directory for a command's output")) from error


def _trace(error: BaseException, code: str) -> str:
    """Where a fault of this program lies; other errors say all there is to say."""
    return "".join(traceback.format_exception(error)) if code == "internal" else ""


def told(error: BaseException) -> tuple[str, int, str]:
    """Code, exit code and message of whatever ended a command."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ExitCode.INTERRUPTED, "interrupted from the keyboard"
    if isinstance(error, PermissionError):
        error = not_allowed(error)
    code, exit_code = getattr(error, "code", None), getattr(error, "exit_code", None)
    if isinstance(code, str) and isinstance(exit_code, int):
        return code, exit_code, str(error)
    return "internal", ExitCode.INTERNAL, f"{type(error).__name__}: {error}"
