"""What a run of many results says at its end: tables, then what needs a reader, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from replay_lib.record.drift import environment_of
from replay_lib.record.result import Result, quiet_faults
from replay_lib.record.table import plain_tables


def in_order(results: Iterable[Result]) -> list[Result]:
    """By case, device and method, the baseline first; the same from any number of processes."""
    return sorted(results, key=lambda r: (r.case, r.device, not r.is_baseline, r.experiment))


def summary_lines(results: Sequence[Result]) -> list[str]:
    """Tables of verdicts, faults of quiet controls, and all that is not as it was stated.

    That is: better or worse than expected, away from its baseline, without a baseline, not listed
    in ``case.yaml``.
    """
    if not results:
        return []
    lines = plain_tables(results).splitlines()
    lines += quiet_faults(results)
    lines += [r.explain() for r in results if r.comparison != "as expected" or r.drift]
    return lines + _unstated(results) + _without_baseline(results)


def _unstated(results: Sequence[Result]) -> list[str]:
    better = _by_case(results, lambda r: r.comparison == "better")
    lines = [
        f"{case}: better than case.yaml says; to hold it to that: spike-replay pin {case} {names}"
        for case, names in better.items()
    ]
    lines += [
        f"{case}: figures left their baselines; if that is meant: pytest --update-baselines"
        for case in _by_case(results, lambda r: bool(r.drift))
    ]
    unlisted = _by_case(results, _is_unlisted, ", ")
    lines += [
        f"{case}: not listed in case.yaml, so expected to pass: {names}"
        for case, names in unlisted.items()
    ]
    lines += [
        f"{r.case} / {r.experiment}: {r.verdict}, was {r.baseline.verdict_before} with the same "
        "figures"
        for r in results
        if r.baseline and r.baseline.state == "kept" and r.baseline.verdict_before != r.verdict
    ]
    return lines


def _is_unlisted(result: Result) -> bool:
    return result.expected is None and not result.is_baseline and result.fidelity != "reduced"


def _without_baseline(results: Sequence[Result]) -> list[str]:
    """Each environment and each case once."""
    unknown = [r for r in results if r.baseline and r.baseline.state == "no document"]
    lines = []
    for told in dict.fromkeys(environment_of(r).told() for r in unknown):
        cases = dict.fromkeys(r.case for r in unknown if environment_of(r).told() == told)
        lines.append(
            f"no baseline for {told}: {', '.join(cases)} (verdicts were compared, figures were not)"
        )
    other = _by_case(
        results, lambda r: r.baseline is not None and r.baseline.state == "another case"
    )
    lines += [
        f"{case}: its baselines are of other files than it has now; figures were not compared"
        for case in other
    ]
    missing = _by_case(
        results, lambda r: r.baseline is not None and r.baseline.state == "no entry", ", "
    )
    return lines + [f"{case}: no baseline for {names}" for case, names in missing.items()]


def _by_case(
    results: Sequence[Result], chosen: Callable[[Result], bool], joint: str = " "
) -> dict[str, str]:
    """Names of the chosen experiments by case, each once."""
    found: dict[str, dict[str, None]] = {}
    for result in filter(chosen, results):
        found.setdefault(result.case, {})[result.experiment] = None
    return {case: joint.join(names) for case, names in found.items()}
