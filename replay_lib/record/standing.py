"""What recorded results make of a method: the one rule behind cards, lists and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replay_lib.record.result import Result
from replay_lib.rule import Status, Verdict

NONE = "none (no result here says what the method alone is worth)"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A method's status and what stands behind it.

    ``status`` is the best that a result gave (None: no result tells), ``count`` of ``recorded``
    results gave it. ``unmeasured`` says that none of these has measured side effects,
    ``held_back`` what keeps passes of it from being proven (flags, in alphabetical order).
    """

    status: Status | None = None
    count: int = 0
    recorded: int = 0
    unmeasured: bool = False
    held_back: tuple[str, ...] = ()

    def told(self) -> str:
        """In words, as cards and lists show it."""
        if self.status is None:
            return NONE
        parts = [f"{self.count} of {self.recorded} recorded"]
        if self.unmeasured:
            parts.append("side effects not measured")
        if self.held_back and self.status is not Status.PROVEN:
            parts.append(f"a pass is held back by {', '.join(self.held_back)}")
        return f"{self.status} ({'; '.join(parts)})"


def standing_of(slug: str, results: Sequence[Result]) -> Standing:
    """The standing of the method ``slug`` after ``results``, of any methods, oldest first.

    Only results under this method alone count: what a combination reaches is not its merit. Of
    several results of one experiment on one device the last counts.
    """
    known = [r for r in latest(results) if [c.slug for c in r.mitigations] == [slug]]
    judged = [(status, r) for r in known if (status := r.status) is not None]
    if not judged:
        return Standing()
    best = min((status for status, _ in judged), key=list(Status).index)
    behind = [r for status, r in judged if status is best]
    worth_telling = best in (Status.PROVEN, Status.PARTIAL)
    return Standing(
        status=best,
        count=len(behind),
        recorded=len(judged),
        unmeasured=worth_telling and not any(r.side_effects_measured for r in behind),
        held_back=_held_back([r for _, r in judged]),
    )


def latest(results: Sequence[Result]) -> list[Result]:
    """The last result of each experiment of a case on one kind of device, in one dtype."""
    last = {(r.case, r.experiment, r.against, r.device, r.dtype): r for r in results}
    return list(last.values())


def _held_back(results: Sequence[Result]) -> tuple[str, ...]:
    passes = [r for r in results if r.verdict is Verdict.PASS]
    return tuple(sorted({str(flag) for r in passes for flag in r.flags}))
