"""The Pareto front: who is not beaten on every axis by somebody else. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from replay_lib.record.result import Result
from replay_lib.sweep.figures import quiet_change_of, reduction_of, retained_of, why_not


@dataclass(frozen=True, kw_only=True)
class Point:
    """One experiment on three axes, all finite: ``reduction`` of the norm (larger is better),
    ``retained`` share of the signal (larger), ``quiet_change`` |relative change| of the quiet
    control's norm (smaller; None: the case has no quiet control, and no point of it has one)."""

    name: str
    reduction: float
    retained: float
    quiet_change: float | None = None

    @property
    def heights(self) -> tuple[float, float, float]:
        """The three figures so that larger is better."""
        return self.reduction, self.retained, -(self.quiet_change or 0.0)


@dataclass(frozen=True)
class Front:
    """``members`` beat one another nowhere on all axes, from the largest reduction down.

    ``dominated`` are the others with a member that is as good on every axis and better on one;
    ``excluded`` are experiments that have no place here, with the reason.
    """

    members: tuple[Point, ...] = ()
    dominated: tuple[tuple[Point, Point], ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()


def dominates(one: Point, other: Point) -> bool:
    """Whether ``one`` is as good as ``other`` on every axis and better on one."""
    pairs = list(zip(one.heights, other.heights, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def front_of(points: Sequence[Point]) -> Front:
    """The front of ``points``; of equal points all are members or none is."""
    best = [p for p in points if not any(dominates(q, p) for q in points)]
    best.sort(key=lambda p: (*(-height for height in p.heights), p.name))
    beaten = [(p, next(q for q in best if dominates(q, p))) for p in points if p not in best]
    return Front(tuple(best), tuple(beaten))


def front_of_results(results: Sequence[Result]) -> Front:
    """The front of everything in ``results`` that can be weighed; baselines are left aside."""
    tried = [result for result in results if not result.is_baseline]
    measured = any(quiet_change_of(result) is not None for result in tried)
    points: list[Point] = []
    excluded: list[tuple[str, str]] = []
    for result in tried:
        placed = _placed(result, measured)
        if isinstance(placed, Point):
            points.append(placed)
        else:
            excluded.append((result.experiment, placed))
    found = front_of(points)
    return Front(found.members, found.dominated, tuple(excluded))


def _placed(result: Result, quiet: bool) -> Point | str:
    """The point of ``result``, or why it has none; ``quiet``: there is a third axis."""
    reason = why_not(result)
    if reason is not None:
        return reason
    reduction, retained = reduction_of(result), retained_of(result)
    change = quiet_change_of(result) if quiet else None
    if reduction is None or not math.isfinite(reduction):
        return "reduction not known"
    if retained is None or not math.isfinite(retained):
        return "retained share not known"
    if quiet and (change is None or not math.isfinite(change)):
        return "change to the quiet control not known"
    return Point(
        name=result.experiment, reduction=reduction, retained=retained, quiet_change=change
    )
