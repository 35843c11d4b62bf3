"""Embed a spike of the zoo as a case, with what the table says as its expectations.

    python benchmarks/embed_zoo.py KIND [--home DIR] [--commit COMMIT]

Reads what ``benchmarks/zoo.py`` made (``--home``) and measured (``benchmarks/results/zoo.json``);
writes ``spike_cases/zoo-KIND``. Embedded is the first seed in order whose step the detector saw,
not the prettiest one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from zoo_table import RESULTS, ROOT

from replay_lib import layout
from replay_lib.case_files import made_here, seal
from replay_lib.run import RECORDED_METHODS
from replay_lib.zoo import find_kind

THRESHOLDS = {
    "target_ratio": {
        "value": 1.5,
        "reason": "1.5 x normal, as the published method documents have it",
    },
    "recording_reduction": {"value": 0.15, "reason": "less is not worth recording, same source"},
}
TOLERANCE = {
    "float32": {
        "value": 1.0e-5,
        "reason": "bit-equal where it was made; another thread count or build moves sums by 1e-7 "
        "to 1e-6, and a float64 step lies within 1e-5",
    },
    "bfloat16": {
        "value": 3.0e-3,
        "reason": "the run was float32: in bfloat16 its norm moves by more than a bfloat16 run's "
        "own noise, so a replay in bfloat16 is told as not reproduced",
    },
}


def first_seed(document: dict[str, Any], kind: str) -> dict[str, Any]:
    """The row of the first seed, in the order fixed before, in which ``kind`` spiked."""
    rows = {r["seed"]: r for r in document["rows"] if r["kind"] == kind}
    for seed in document["seeds"]:
        if seed not in rows:
            raise SystemExit(f"{kind}: seed {seed} was not run, so a later one is not the first")
        if rows[seed]["event"] == "spike":
            return rows[seed]
    raise SystemExit(f"{kind}: no seed spiked")


def case_text(row: dict[str, Any], snapshot: str, quiet: str) -> str:
    """``case.yaml`` without its digests."""
    kind = find_kind(row["kind"])
    expected = {
        name: figures["verdict"]
        for name, figures in row["methods"].items()
        if name in RECORDED_METHODS
    }
    document = {
        "schema": 1,
        "snapshot": snapshot,
        "quiet": quiet,
        "note": f"Cause: {kind.summary}. Seed {row['seed']} is the first in order that spiked; "
        f"the step is {row['ratio']:.2f} x its median. Expected is what "
        "benchmarks/results/zoo.json measured, misses included.",
        "thresholds": THRESHOLDS,
        "tolerance": TOLERANCE,
        "needs": {"device": "any", "devices": 1, "memory_gib": 1.0},
        "expected": expected,
        "provenance": {
            "evidence": "measured",
            "trainer": "this library's zoo (docs/zoo.md)",
            "job": "GRPO on a tiny MoE: 4 layers, 8 experts top-2, hidden 64, float32, dp=1",
            "written_by": "replay_lib.recorder.SpikeRecorder during the run",
        },
    }
    return yaml.safe_dump(document, sort_keys=False, width=96, allow_unicode=True)


def main() -> None:
    """Copy both snapshots, write the case, seal it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("--home", type=Path, default=Path("out/zoo"))
    parser.add_argument("--commit", help="whose code made it; default: the one checked out")
    options = parser.parse_args()
    row = first_seed(json.loads(RESULTS.read_text()), options.kind)
    made = options.home / f"seed{row['seed']}" / options.kind
    report = json.loads((made / "zoo.json").read_text())
    target = ROOT / "spike_cases" / f"zoo-{options.kind}"
    shutil.rmtree(target, ignore_errors=True)
    places = {
        name: f"{name}/{Path(report[key]).name}"
        for name, key in (("snapshot", "snapshot"), ("quiet", "quiet"))
    }
    for name, key in (("snapshot", "snapshot"), ("quiet", "quiet")):
        shutil.copytree(made / report[key], target / places[name])
    text = case_text(row, places["snapshot"], places["quiet"])
    (target / layout.CASE_FILE).write_text(text, encoding="utf-8")
    command = f"spike-replay zoo make {options.kind} --seed {row['seed']} --out DIR"
    made_by = made_here(command, seed=row["seed"])
    case = seal(target, made_by | ({"commit": options.commit} if options.commit else {}))
    print(f"{case.name}: {row['ratio']:.2f} x median, expected {dict(case.expected)}")


if __name__ == "__main__":
    main()
