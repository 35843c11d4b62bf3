"""Kind x seed: norm over median, and what the recorded methods do to each spike.

    python benchmarks/zoo.py [--home DIR] [--seeds 1,2,3] [--kinds KIND,...]

Every finished kind is written to ``benchmarks/results/zoo.json`` at once; what is there already is
not made again. The seeds below were fixed before the first run. The norms are those of the CPU that
this ran on: the same seed gives the same norm on the same platform.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from environment import environment
from zoo_table import RESULTS

from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.record.result import Result
from replay_lib.run import RECORDED_METHODS, ReplayOptions, replay_case
from replay_lib.zoo import KINDS, make_spikes

SEEDS = (1, 2, 3)

#: Besides the recorded ones: the pair for wrong routes in the first layer.
EXTRA = ("use-current-routing-for-first-moe-layer+enable-token-mismatch-tis-max2",)
METHODS = (*RECORDED_METHODS, *EXTRA)


def replay_row(snapshot: Path) -> dict[str, Any]:
    """The baseline and every method on one snapshot, in one session, judged."""
    experiments = [Experiment.parse(name) for name in METHODS]
    case = Case.from_snapshot(snapshot)
    options = ReplayOptions(device="cpu", precision="float32")
    replayed = replay_case(case, experiments, options, lambda step: None)
    assert not replayed.refused, replayed.refused
    baseline, *others = replayed.results
    return {
        "replayed_norm": baseline.grad_norm_preclip,
        "baseline": str(baseline.verdict),
        "methods": {r.experiment: _figures(r) for r in others},
    }


def _figures(result: Result) -> dict[str, Any]:
    """The verdict, and per treatment of the old log-probabilities ratio, reduction, retained."""
    treated = {old.old: old for old in result.old} or {"stored": result}
    return {
        "verdict": str(result.verdict),
        "flags": [str(flag) for flag in result.flags],
        "ratio": {name: one.ratio for name, one in treated.items()},
        "reduction": {name: one.reduction for name, one in treated.items()},
        "retained": {
            name: one.retained.smallest
            for name, one in treated.items()
            if one.retained is not None and math.isfinite(one.retained.smallest)
        },
    }


def make_seed(seed: int, kinds: list[str], home: Path, document: dict[str, Any]) -> None:
    """Make the kinds of one seed that are missing, and note their norms."""
    done = {(row["kind"], row["seed"]) for row in document["rows"]}
    missing = [kind for kind in kinds if (kind, seed) not in done]
    made = home / f"seed{seed}"
    reports = [json.loads(file.read_text()) for file in sorted(made.glob("*/zoo.json"))]
    there = {report["kind"]: report for report in reports}
    wanted = {kind: made / kind for kind in missing if kind not in there}
    if wanted:
        told = make_spikes(wanted, seed=seed, cache=home / "cache", tell=_tell)
        there |= {report["kind"]: report for report in told}
    for report in (there[kind] for kind in missing):
        names = ("kind", "seed", "step", "norm", "median", "ratio", "event", "accuracy", "snapshot")
        row = {name: report[name] for name in names}
        row["largest_quiet_ratio"] = max(report["norms"][10:50]) / report["median"]
        document["rows"].append(row)
    _save(document)


def replay_spikes(seed: int, kinds: list[str], home: Path, document: dict[str, Any]) -> None:
    """Replay the spikes of one seed that have no figures yet, saving after each."""
    rows = {row["kind"]: row for row in document["rows"] if row["seed"] == seed}
    for kind in kinds:
        row = rows[kind]
        if row["event"] == "spike" and "methods" not in row:
            row |= replay_row(home / f"seed{seed}" / kind / row["snapshot"])
            _save(document)
            _tell(f"{kind} seed {seed}: {row['ratio']:.2f} x median")


def _save(document: dict[str, Any]) -> None:
    order = {kind: n for n, kind in enumerate(KINDS)}
    document["rows"].sort(key=lambda row: (order[row["kind"]], row["seed"]))
    part = RESULTS.with_name(f".{RESULTS.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(RESULTS)


def _tell(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def main() -> None:
    """Run what is missing of kind x seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path("out/zoo"), help="snapshots and cache")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    document: dict[str, Any] = {"benchmark": "zoo", "seeds": list(SEEDS), "rows": []}
    if RESULTS.exists():
        document = json.loads(RESULTS.read_text())
    document["environment"] = environment()
    seeds, kinds = list(map(int, options.seeds.split(","))), options.kinds.split(",")
    for seed in seeds:
        make_seed(seed, kinds, options.home, document)
    for seed in seeds:
        replay_spikes(seed, kinds, options.home, document)


if __name__ == "__main__":
    main()
