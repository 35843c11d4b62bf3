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

    Each case is replayed under the recorded methods, then under combinations and parameters that it
    has an expectation of: a cure of its own. All other methods are for ``sweep`` and the suite.
    """
    cases = discover(builtin_cases())
    if not cases:
        raise CaseError(fault(builtin_cases(), None, "no case", "the embedded cases"))
    for case in cases:
        case.require()
    methods = load_methods(options.mitigations)
    asked = [
        [*RECORDED_METHODS, *(label for label in case.expected if label not in methods)]
        for case in cases
    ]
    experiments = [parse_experiments(labels, "baseline", methods) for labels in asked]
    check_results_file(results, append=False)
    replayed = Replayed()
    for case, wanted in zip(cases, experiments, strict=True):
        replayed += replay_case(case, wanted, options, tell)
    write_results(results, replayed.results)
    return replayed
