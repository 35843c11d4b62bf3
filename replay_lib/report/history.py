"""Gradient norms of a run's steps, as far as a task's ledger knows any."""

from __future__ import annotations

import math
from dataclasses import dataclass

from replay_lib.report.facts import Facts, step_of


@dataclass(frozen=True)
class Point:
    """One step. ``norm`` is L2 before clipping, ``median`` that of the steps before it.

    ``detector`` is the ratio above which the run called a step a spike, ``target`` the one at or
    under which a replay passes.
    """

    step: int
    norm: float
    median: float | None = None
    detector: float | None = None
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        """Norm over median."""
        return self.norm / self.median if self.median else None


def history_of(facts: Facts) -> list[Point]:
    """Every step whose norm is known, in order; where several say something, the replay's word."""
    points: dict[int, Point] = {}
    for warned in facts.warnings:
        _add(points, warned.get("step"), _read(warned.get("norm")))
    for seen in facts.found:
        _add(points, seen.get("step"), seen.get("grad_norm_preclip"), seen.get("grad_norm_median"))
    for signals in facts.analyzed.values():
        norms = signals.norms
        for step, norm in norms.history:
            _add(points, step, norm)
        thresholds = (norms.spike_ratio, norms.target_ratio)
        _add(points, norms.step, norms.grad_norm_preclip, norms.median, *thresholds)
    for attempt in facts.attempts:
        one = attempt.result
        known = (one.recorded_norm, one.median_norm, one.detector_ratio, one.target_ratio)
        _add(points, step_of(attempt.snapshot), *known)
    return [points[step] for step in sorted(points)]


def _add(points: dict[int, Point], step: object, norm: object, *known: object) -> None:
    """Take what is a positive number; the rest, from an edited file say, is not known."""
    height = _positive(norm)
    if isinstance(step, int) and height is not None:
        points[step] = Point(step, height, *map(_positive, known))


def _read(norm: object) -> float | None:
    """A number as a log has it."""
    try:
        return float(str(norm))
    except ValueError:
        return None


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None
