"""Pin what a case expects: replay methods, and write their verdicts into its ``case.yaml``.

A verdict is pinned as it fell, misses included; from then on a worse one is red. What does not
depend on the method alone is refused: a spike that does not come out again, a part of its ranks,
another trainer's loss.

A verdict that is right on another machine is not overwritten by this one's: it is held, and told,
until somebody says that both are right (and why), or that the old one is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay_lib import layout
from replay_lib.case import Case, refuse_several
from replay_lib.case_files import write_expected
from replay_lib.errors import CaseError, UsageError, fault
from replay_lib.expectations import check_expected
from replay_lib.expected import Expected
from replay_lib.methods import callable_alone, left_out, load_methods
from replay_lib.patch import Mitigation
from replay_lib.record.baselines import files_in, read_document
from replay_lib.record.drift import compared, environment_of
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.rule import Verdict, compare
from replay_lib.run import (
    Keep,
    Replayed,
    ReplayOptions,
    Tell,
    parse_experiments,
    replay_case,
)


@dataclass(frozen=True)
class Change:
    """One expectation before and after; ``before`` is None where the case stated none.

    ``now`` is the verdict that fell, ``reason`` the verdict's. ``held`` says why ``after`` is
    still what it was (empty: it is not held).
    """

    experiment: str
    before: Expected | None
    now: Verdict
    after: Expected
    reason: str
    held: str = ""

    @property
    def word(self) -> str:
        """``new``, ``unchanged``, ``held``, ``widened``, ``narrowed``, ``better`` or ``worse``."""
        if self.before is None:
            return "new"
        if self.after == self.before:
            return "held" if self.held else "unchanged"
        if self.after.several:
            return "widened"
        told = compare(self.now, *self.before.verdicts)
        return "narrowed" if told == "as expected" else told


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to do where the case states another verdict than fell.

    ``widen``: expect both, for this reason. ``replace``: what fell, in place of all that is
    stated. Neither: what fell, unless the stated one is right elsewhere.
    """

    widen: str | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        if self.replace and self.widen is not None:
            raise UsageError("pin: --widen keeps what is stated, --replace does not; give one")
        if self.widen is not None and not self.widen.strip():
            raise UsageError("pin: --widen: found no text, expected why both verdicts are right")


@dataclass(frozen=True)
class Pinned:
    """What came out, and whether the case was written."""

    case: str
    changes: tuple[Change, ...]
    refused: tuple[Refusal, ...]
    written: bool
    left_out: str = ""  # the registered methods that were not tried, told

    @property
    def held(self) -> tuple[Change, ...]:
        """Those that stayed as they were although another verdict fell."""
        return tuple(one for one in self.changes if one.held)


def pin(
    directory: Path,
    labels: Sequence[str],
    options: ReplayOptions,
    tell: Tell,
    *,
    write: bool,
    wish: Wish = Wish(),
    keep: Keep = lambda _one: None,
) -> Pinned:
    """Replay ``labels`` (none given: all registered methods and what the case expects already).

    A registered method that needs a parameter is left out, unless the case expects something of it.

    Raises CaseError where ``directory`` holds no case or its baseline does not reproduce the
    spike. Methods that the case cannot take are refused one by one and keep what they had.
    """
    case = _case(directory)
    if options.dp_ranks is not None:
        raise UsageError("pin: a part of the ranks is a diagnostic; pin what all of them give")
    methods = load_methods(options.mitigations)
    check_expected(case, methods)
    asked = labels or labels_to_pin(case, methods)
    experiments = parse_experiments(asked, "baseline", methods)
    replayed = replay_case(case, experiments, options, tell, keep=keep)
    _require_baseline(case, replayed)
    changes = tuple(_change(case, result, wish) for result in replayed.results[1:])
    found = {c.experiment: c.after.plain() for c in changes if c.after != c.before}
    if write and found:
        write_expected(directory, found)
    without = "" if labels else left_out(methods)
    return Pinned(case.name, changes, replayed.refused, write and bool(found), without)


def labels_to_pin(case: Case, methods: Mapping[str, Mitigation]) -> list[str]:
    """What is pinned where nobody says: what is expected, and all that need no parameter."""
    return list(dict.fromkeys([*case.expected, *callable_alone(methods)]))


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


def _change(case: Case, result: Result, wish: Wish) -> Change:
    before, now = case.expected.get(result.experiment), result.verdict
    after, held = Expected.one(now), ""
    if before is not None and not wish.replace:
        if wish.widen is not None:
            after = before.widened(now, wish.widen)
        elif now in before.verdicts or (held := _right_elsewhere(case, result, before)):
            after = before
    return Change(result.experiment, before, now, after, result.reason, held)


def _right_elsewhere(case: Case, result: Result, before: Expected) -> str:
    """Why another machine may still give what is stated ("": nothing says that it would).

    Where this environment's own baseline has the stated verdict and figures that are kept, only
    the difference between a gradient that is bit-equal and one that is not can be arithmetic.
    """
    if before.several:
        return "several verdicts are stated"
    assert case.file is not None
    stated, own = before.verdicts[0], environment_of(result)
    documents = [d for file in files_in(case.file) if (d := read_document(file)) is not None]
    found = {
        d.environment: entry
        for d in documents
        if d.environment.dp_ranks is None
        and d.case_digest == case.digest()
        and (entry := d.methods.get(result.experiment))
    }
    if own not in found:
        others = sorted(e.slug for e, entry in found.items() if entry.verdict == stated)
        return f"{stated} in the baselines of {', '.join(others)}" if others else ""
    if found[own].verdict != stated or Verdict.NO_OP not in (stated, result.verdict):
        return ""
    document = next(d for d in documents if d.environment == own)
    same = not compared(result, document, case.digest()).drift
    return f"{stated} in this environment's baseline, with the same figures" if same else ""
