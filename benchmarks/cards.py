"""Recorded results of the embedded cases, onto the cards of the methods.

    python benchmarks/cards.py RESULTS.jsonl [--replay] [--cards DIR]

``--replay`` first replays every embedded case under the methods of which RESULTS has no result on
it yet, case after case on a CPU, and appends the results there (minutes a case): a run that was
killed is continued by the same command; with another RESULTS all of it is done anew. Then the
results are rendered into the cards and their index; a card whose method has none is left as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from replay_lib.case import Case, builtin_cases, discover
from replay_lib.methods import callable_alone, load_methods
from replay_lib.record.cards import update_cards
from replay_lib.record.result import Result
from replay_lib.record.results_file import append_results, read_results
from replay_lib.run import ReplayOptions, parse_experiments, replay_case


def lacking(case: Case, labels: Sequence[str], known: Sequence[Result]) -> list[str]:
    """The methods of which ``known`` has no result on ``case``."""
    there = {r.experiment for r in known if (r.case, r.against) == (case.name, "baseline")}
    return [label for label in labels if label not in there]


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay what is missing, if asked to, and render; the number of files that changed is told."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--replay", action="store_true", help="sweep the cases that are missing")
    parser.add_argument("--cards", type=Path, help="the directory of the cards [default: ours]")
    asked = parser.parse_args(arguments)
    methods = load_methods()
    results = read_results(asked.results) if asked.results.is_file() else []
    for case in discover(builtin_cases()) if asked.replay else []:
        labels = lacking(case, callable_alone(methods), results)
        if not labels:
            continue
        experiments = parse_experiments(labels, "baseline", methods)
        replayed = replay_case(case, experiments, ReplayOptions(device="cpu"))
        append_results(asked.results, replayed.results)
        for refusal in replayed.refused:
            print(f"{refusal.case} / {refusal.experiment}: {refusal.error}", file=sys.stderr)
        print(f"{case.name}: {len(replayed.results)} results", file=sys.stderr)
        results += replayed.results
    changed = update_cards(results, methods, asked.cards)
    print(f"{len(changed)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
