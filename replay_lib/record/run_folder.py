"""The folder that a run of the suite leaves: what it planned, what its tests and replays gave.

    plan.json       its shard, its tests, and what was wrong with the run as a whole
    tests.jsonl     one test a line: passed, failed or skipped, and why
    results.jsonl   one replay a line (record/result.py)
    report.txt      rendered from the three others

Plan and lines are written while the run goes on, so a killed run leaves what it had done. Running
it again into the same folder adds to that; of two lines about one test or replay the later counts.
Folders of shards merge into one that has the report of one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from replay_lib import layout
from replay_lib.engine.protocol import Frozen
from replay_lib.errors import UsageError, fault
from replay_lib.record.drift import environment_of
from replay_lib.record.result import Result
from replay_lib.record.results_file import (
    append_lines,
    append_results,
    check_results_file,
    lines_of,
    read_results,
    write_lines,
)
from replay_lib.record.results_file import write_results as replace_results
from replay_lib.record.shards import Shard
from replay_lib.record.summary import in_order, summary_lines
from replay_lib.writing import replace_file

PLAN, TESTS, REPORT = "plan.json", "tests.jsonl", "report.txt"


class TestOutcome(Frozen):
    """How one test ended; ``message`` is one line, empty where it passed."""

    __test__ = False  # no test class, whatever its name

    test: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str = ""


class Plan(Frozen):
    """``shard`` is ``i/n``, None for a whole run; ``faults`` are those of no single test."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    shard: str | None = None
    tests: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """A folder's content: each test and each replay once, in one order."""

    plan: Plan
    tests: tuple[TestOutcome, ...]
    results: tuple[Result, ...]

    @property
    def not_run(self) -> list[str]:
        """Planned tests without an outcome: the run was killed, or is not over."""
        return sorted(set(self.plan.tests) - {one.test for one in self.tests})

    @property
    def green(self) -> bool:
        """Whether all planned tests ended, none failed, and nothing is wrong with the run."""
        failed = any(one.outcome == "failed" for one in self.tests)
        return bool(self.tests) and not (failed or self.not_run or self.plan.faults)

    def report(self) -> str:
        """Counts, the summary of all results, then every test that did not pass."""
        counts = [
            f"{number} {word}"
            for word in ("passed", "failed", "skipped")
            if (number := sum(one.outcome == word for one in self.tests))
        ]
        counts += [f"{len(self.not_run)} not run"] if self.not_run else []
        lines = [", ".join(counts) or "no test", *summary_lines(self.results)]
        lines += [
            f"{one.outcome}: {one.test}: {one.message}"
            for one in self.tests
            if one.outcome != "passed"
        ]
        lines += [f"not run: {test}" for test in self.not_run]
        return "\n".join([*lines, *self.plan.faults]) + "\n"


def start_run(folder: Path, shard: Shard | None, tests: Iterable[str]) -> None:
    """Write the plan; a folder that has one keeps its tests.

    UsageError where it is of another shard, or what the run gives could not be added to it: hours
    of replay would be lost.
    """
    name = None if shard is None else str(shard)
    planned = set(tests)
    for file in (TESTS, layout.RESULTS):
        check_results_file(folder / file)
    if (folder / PLAN).exists():
        before = read_run(folder).plan
        if before.shard != name:
            raise UsageError(
                fault(folder / PLAN, "shard", f"{before.shard}", f"{name}", "Take another folder")
            )
        planned |= set(before.tests)
    _write_plan(folder, Plan(shard=name, tests=tuple(sorted(planned))))


def add_to_run(folder: Path, tests: Sequence[TestOutcome], results: Sequence[Result]) -> None:
    """Keep what ended since the last call."""
    if tests:
        append_lines(folder / TESTS, [one.model_dump() for one in tests])
    if results:
        append_results(folder / layout.RESULTS, results)


def finish_run(folder: Path, faults: Sequence[str]) -> Run:
    """Drop what later lines replaced, add ``faults`` and write the report."""
    found = read_run(folder)
    plan = found.plan.model_copy(update={"faults": tuple(faults)})
    return _write(folder, Run(plan, found.tests, found.results))


def read_run(folder: Path) -> Run:
    """What a run left in ``folder``; UsageError where that is no such folder, or a file is torn."""
    plan = _read_plan(folder)
    return _run(plan, _read_tests(folder / TESTS), _read_results(folder / layout.RESULTS))


def merge_runs(out: Path, folders: Sequence[Path]) -> Run:
    """Write ``folders`` as one run into ``out``; what a later folder has replaces an earlier's.

    All have to be shards of one count, or none a shard. A shard that is absent is a fault of the
    merged run, and so is a case of which the folders replayed different files. UsageError where
    ``out`` is one of ``folders``, or holds a shard or anything that is no run.
    """
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise UsageError(fault(out, None, "a folder to be merged", "another one for the result"))
    if out.exists() and not out.is_dir():
        raise UsageError(fault(out, None, "no directory", "a folder for the result"))
    if out.exists() and any(out.iterdir()) and _read_plan(out).shard is not None:
        raise UsageError(fault(out, None, "a shard's folder", "a new one for the result"))
    runs = [read_run(folder) for folder in folders]
    faults = [fault_ for run in runs for fault_ in run.plan.faults]
    faults += _absent_shards([run.plan.shard for run in runs], folders)
    tests = {test for run in runs for test in run.plan.tests}
    results = [result for run in runs for result in run.results]
    faults += _disputed_cases(results)
    plan = Plan(tests=tuple(sorted(tests)), faults=tuple(dict.fromkeys(faults)))
    out.mkdir(parents=True, exist_ok=True)
    return _write(out, _run(plan, [one for run in runs for one in run.tests], results))


def _absent_shards(names: Sequence[str | None], folders: Sequence[Path]) -> list[str]:
    given = [None if name is None else Shard.parse(name) for name in names]
    counts = {None if shard is None else shard.count for shard in given}
    if len(counts) > 1:
        told = ", ".join(f"{f}: {s or 'no shard'}" for f, s in zip(folders, given, strict=True))
        raise UsageError(f"merge: found {told}, expected shards of one count, or none a shard")
    here = [shard for shard in given if shard is not None]
    absent = sorted(set(range(1, here[0].count + 1)) - {s.index for s in here}) if here else []
    return [f"shard {index}/{here[0].count} is absent" for index in absent]


def _disputed_cases(results: Iterable[Result]) -> list[str]:
    digests: dict[str, set[str]] = {}
    for result in results:
        if result.case_digest:
            digests.setdefault(result.case, set()).add(result.case_digest)
    return [
        f"{case}: {len(found)} different sets of files were replayed under this name"
        for case, found in sorted(digests.items())
        if len(found) > 1
    ]


def _run(plan: Plan, tests: Iterable[TestOutcome], results: Iterable[Result]) -> Run:
    """Each test and each replay once, the last one of each."""
    last = {one.test: one for one in tests}
    kept = {_key(result): result for result in results}
    return Run(plan, tuple(last[name] for name in sorted(last)), tuple(in_order(kept.values())))


def _key(result: Result) -> tuple[str, ...]:
    environment = environment_of(result).slug
    return (result.case, result.case_digest, result.experiment, result.against, environment)


def _write(folder: Path, run: Run) -> Run:
    write_lines(folder / TESTS, [one.model_dump() for one in run.tests])
    replace_results(folder / layout.RESULTS, run.results)
    _write_plan(folder, run.plan)
    replace_file(folder / REPORT, run.report().encode("utf-8"))
    return run


def _write_plan(folder: Path, plan: Plan) -> None:
    text = json.dumps(plan.model_dump(mode="json", by_alias=True), indent=1) + "\n"
    replace_file(folder / PLAN, text.encode("utf-8"))


def _read_plan(folder: Path) -> Plan:
    file = folder / PLAN
    if not file.is_file():
        then = "pytest --spike-results=DIR writes one"
        raise UsageError(fault(file, None, "no such file", "the plan of a run", then))
    try:
        return Plan.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UsageError(
            fault(file, None, error.errors()[0]["msg"], "the plan of a run")
        ) from error


def _read_results(file: Path) -> list[Result]:
    return read_results(file) if file.exists() else []


def _read_tests(file: Path) -> list[TestOutcome]:
    lines = lines_of(file) if file.exists() else []
    return [_parse(file, number, line) for number, line in enumerate(lines, start=1)]


def _parse(file: Path, number: int, line: str) -> TestOutcome:
    try:
        raw: Any = json.loads(line)
        return TestOutcome.model_validate(raw)
    except (ValueError, ValidationError) as error:
        told = str(error).splitlines()[0]
        raise UsageError(fault(file, f"line {number}", told, "one test's outcome")) from error
