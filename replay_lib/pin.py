"""Pin what a case expects: replay methods, and write their verdicts into its ``case.yaml``.

A verdict is pinned as it fell, misses included; from then on a worse one is red. What does not
depend on the method alone is refused: a spike that does not come out again, a part of its ranks,
another trainer's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replay_lib import layout
from replay_lib.case import Case, refuse_several
from replay_lib.case_files import write_expected
from replay_lib.errors import CaseError, UsageError, fault
from replay_lib.expectations import check_expected
from replay_lib.methods import load_methods
from replay_lib.record.result import Result
from replay_lib.rule import Verdict, compare
from replay_lib.run import (
    Refusal,
    Replayed,
    ReplayOptions,
    Tell,
    parse_experiments,
    replay_case,
)


@dataclass(frozen=True)
class Change:
    """One expectation before and after; ``before`` is None where the case stated none."""

    experiment: str
    before: Verdict | None
    after: Verdict
    reason: str

    @property
    def word(self) -> str:
        """``new``, ``unchanged``, ``better`` or ``worse``."""
        if self.before is None:
            return "new"
        told = compare(self.after, self.before)
        return "unchanged" if told == "as expected" else told


@dataclass(frozen=True)
class Pinned:
    """What came out, and whether the case was written."""

    case: str
    changes: tuple[Change, ...]
    refused: tuple[Refusal, ...]
    written: bool


def pin(
    directory: Path, labels: Sequence[str], options: ReplayOptions, tell: Tell, *, write: bool
) -> Pinned:
    """Replay ``labels`` (none given: all registered methods and what the case expects already).

    Raises CaseError where ``directory`` holds no case or its baseline does not reproduce the
    spike. Methods that the case cannot take are refused one by one and keep what they had.
    """
    case = _case(directory)
    if options.dp_ranks is not None:
        raise UsageError("pin: a part of the ranks is a diagnostic; pin what all of them give")
    methods = load_methods(options.mitigations)
    check_expected(case, methods)
    asked = list(labels) or list(dict.fromkeys([*case.expected, *methods]))
    replayed = replay_case(case, parse_experiments(asked, "baseline", methods), options, tell)
    _require_baseline(case, replayed)
    changes = tuple(_change(case, result) for result in replayed.results[1:])
    found = {c.experiment: str(c.after) for c in changes}
    new = write and any(c.word != "unchanged" for c in changes)
    if new:
        write_expected(directory, found)
    return Pinned(case.name, changes, replayed.refused, new)


def _case(directory: Path) -> Case:
    if not (directory / layout.CASE_FILE).is_file():
        refuse_several(directory)
        raise CaseError(
            fault(
                directory,
                None,
                f"no {layout.CASE_FILE}",
                "a case directory",
                "Put a case.yaml beside the snapshot first (see the README)",
            )
        )
    case = Case.load(directory)
    case.require()
    return case


def _require_baseline(case: Case, replayed: Replayed) -> None:
    baseline = replayed.results[0] if replayed.results else None
    if baseline is None or baseline.verdict is not Verdict.REPRODUCED:
        told = "its baseline was refused" if baseline is None else baseline.explain()
        raise CaseError(f"{case.name}: nothing was pinned: {told}")


def _change(case: Case, result: Result) -> Change:
    before = case.expected.get(result.experiment)
    return Change(result.experiment, before, result.verdict, result.reason)
