"""What a search came to, as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replay_lib.record.result import Result
from replay_lib.sweep.pareto import Point
from replay_lib.sweep.sweeping import Swept

TITLES = ("on the front", "reduction", "retained", "quiet change", "verdict", "seconds")


def document(swept: Swept) -> dict[str, Any]:
    """The ``sweep`` part of the JSON document; figures are shares, seconds those of a replay."""
    verdicts = _by_name(swept.results)
    return {
        "budget": swept.budget,
        "experiments": len(swept.results) - 1 + len(swept.refused),
        "resumed": swept.resumed,
        "pairs": list(swept.pairs),
        "untried": list(swept.untried),
        "left": list(swept.left),
        "skipped": [{"experiment": name, "reason": why} for name, why in swept.skipped],
        "front": [_point(p) | _told(verdicts[p.name]) for p in swept.front.members],
        "dominated": [_point(p) | {"by": by.name} for p, by in swept.front.dominated],
        "excluded": [{"experiment": name, "reason": why} for name, why in swept.front.excluded],
        "notes": list(swept.notes),
    }


def front_rows(swept: Swept) -> list[tuple[str, ...]]:
    """The members of the front as rows under :data:`TITLES`."""
    results = _by_name(swept.results)
    return [_row(point, results[point.name]) for point in swept.front.members]


def remarks(swept: Swept) -> list[str]:
    """One line each: what was replayed, what was not and why, what is not on the front."""
    pairs = len(swept.pairs)
    tried = len(swept.results) - 1 + len(swept.refused)
    lines = [
        f"{tried} of at most {swept.budget} experiments: {tried - pairs} single methods, "
        f"{pairs} pairs"
    ]
    if swept.resumed:
        lines.append(f"resumed: {swept.resumed} results of an earlier run were not replayed again")
    lines += swept.notes
    if swept.untried:
        lines.append(f"no room for the methods {', '.join(swept.untried)}")
    if swept.left:
        lines.append(f"no room for {len(swept.left)} more pairs, the next is {swept.left[0]}")
    # what has no place on the front is told once, there
    elsewhere = set(swept.front.excluded)
    lines += _grouped("not paired", [told for told in swept.skipped if told not in elsewhere])
    lines += _grouped("not on the front", swept.front.excluded)
    beaten = [f"{point.name} (by {by.name})" for point, by in swept.front.dominated]
    if beaten:
        lines.append(f"dominated: {', '.join(beaten)}")
    return lines


def _by_name(results: Sequence[Result]) -> Mapping[str, Result]:
    return {result.experiment: result for result in results}


def _point(point: Point) -> dict[str, Any]:
    return {
        "experiment": point.name,
        "reduction": point.reduction,
        "retained": point.retained,
        "quiet_change": point.quiet_change,
    }


def _told(result: Result) -> dict[str, Any]:
    return {
        "verdict": str(result.verdict),
        "flags": [str(flag) for flag in result.flags],
        "diagnostic": result.diagnostic,
        "seconds": result.seconds,
    }


def _row(point: Point, result: Result) -> tuple[str, ...]:
    marks = [str(flag) for flag in result.flags if str(flag) != str(result.verdict)]
    marks += ["diagnostic"] if result.diagnostic else []
    verdict = f"{result.verdict} ({', '.join(marks)})" if marks else str(result.verdict)
    return (
        point.name,
        f"{point.reduction:.1%}",
        f"{point.retained:.1%}",
        "-" if point.quiet_change is None else f"{point.quiet_change:.1%}",
        verdict,
        f"{result.seconds:.2f}",
    )


def _grouped(title: str, told: Iterable[tuple[str, str]]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in told:
        by_reason.setdefault(reason, []).append(name)
    return [f"{title}, {reason}: {', '.join(names)}" for reason, names in by_reason.items()]
