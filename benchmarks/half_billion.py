"""A model of 0.56 billion parameters: trained, recorded and replayed on one GPU.

    python benchmarks/half_billion.py OUT.json [--kinds KIND ...] [--precision float32 bfloat16]

For each kind and precision: what the training step recorded, what its replay gives, whether two
sessions are bit-equal, what each recorded method does to it, and seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.run import RECORDED_METHODS
from replay_lib.zoo import make_spikes
from replay_lib.zoo.recipe import find_recipe


def tell(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def replayed(snapshot: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Two sessions of one snapshot, the first with all methods."""
    names = ("baseline", *RECORDED_METHODS)
    start = time.perf_counter()
    with ReplaySession.open(snapshot, device="cuda") as session:
        opened = time.perf_counter() - start
        outcomes = list(session.run_many([Experiment.parse(n) for n in names]))
        bare = min(session.bare_seconds(4))
        info = session.info
    with ReplaySession.open(snapshot, device="cuda") as session:
        again = session.run(Experiment.baseline())
    base = outcomes[0]
    return {
        "parameters": info.parameters,
        "device": info.device,
        "fidelity": info.fidelity,
        "replayed_norm": base.grad_norm_preclip,
        "off_recorded": abs(base.grad_norm_preclip / report["norm"] - 1),
        "two_sessions_bit_equal": again.digest == base.digest,
        "methods_over_median": {
            name: [
                norm and norm / report["median"]
                for norm in (o.grad_norm_preclip, o.grad_norm_preclip_carried)
            ]
            for name, o in zip(names[1:], outcomes[1:], strict=True)
        },
        "open_seconds": opened,
        "bare_pass_seconds": bare,
    }


def measure(kinds: list[str], precision: str, scratch: Path) -> list[dict[str, Any]]:
    """Rows of one precision."""
    recipe = find_recipe("half-billion", precision=precision)
    places = {kind: scratch / precision / kind for kind in kinds}
    start = time.perf_counter()
    cache = scratch / f"cache-{precision}"
    made = make_spikes(places, seed=1, cache=cache, recipe=recipe, tell=tell)
    seconds = time.perf_counter() - start
    rows = []
    for report in made:
        row = {k: report[k] for k in ("kind", "seed", "step", "event", "norm", "median", "ratio")}
        row |= {"precision": precision, "making_all_seconds": seconds, "norms": report["norms"]}
        if report["snapshot"] is not None:
            row |= replayed(places[report["kind"]] / report["snapshot"], report)
        tell(json.dumps(row))
        rows.append(row)
    return rows


def main() -> None:
    """Measure and write OUT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["poisoned-row", "prompt-routes-outage"])
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [row for p in options.precision for row in measure(options.kinds, p, Path(scratch))]
    document = {"benchmark": "half_billion", "environment": environment(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
