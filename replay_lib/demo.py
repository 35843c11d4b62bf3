"""The demonstration: every embedded case under the recorded methods."""

from __future__ import annotations

from pathlib import Path

from replay_lib.case import builtin_cases, discover
from replay_lib.errors import CaseError, fault
from replay_lib.methods import load_methods
from replay_lib.record.results_file import check_results_file, write_results
from replay_lib.run import (
    RECORDED_METHODS,
    Replayed,
    ReplayOptions,
    Tell,
    parse_experiments,
    replay_case,
)

RESULTS = Path("out") / "demo" / "results.jsonl"


def run_demo(options: ReplayOptions, results: Path, tell: Tell) -> Replayed:
    """Replay, judge, and put the results into ``results``; CaseError where no case is found.

    Each case is replayed under the recorded methods; all others are for ``sweep`` and the suite.
    """
    cases = discover(builtin_cases())
    if not cases:
        raise CaseError(fault(builtin_cases(), None, "no case", "the embedded cases"))
    for case in cases:
        case.require()
    methods = load_methods(options.mitigations)
    experiments = parse_experiments(RECORDED_METHODS, "baseline", methods)
    check_results_file(results, append=False)
    replayed = Replayed()
    for case in cases:
        replayed += replay_case(case, experiments, options, tell)
    write_results(results, replayed.results)
    return replayed
