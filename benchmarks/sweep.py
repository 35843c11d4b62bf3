"""What a sweep costs against bare passes of the same engine, in one run.

    python benchmarks/sweep.py OUT.json [--shape small|large] [--device auto|cpu|cuda]

A bare pass is one forward with forced routes and one backward, without loss or patches. A method
that changes the forward is replayed twice (stored and carried old log-probabilities), so its
seconds are given for each replay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import synthetic
from environment import environment
from synthetic import SHAPES

from replay_lib.engine.machine import has_cuda
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.run import RECORDED_METHODS

NAMES = ("baseline", *RECORDED_METHODS)
LOSS_ONLY = "enable-token-mismatch-tis-max2"
OWN_FORWARD = "use-current-routing-for-first-moe-layer"
REPEATS = 5


def timed(session: ReplaySession, names: tuple[str, ...]) -> tuple[float, list[Outcome]]:
    """Wall seconds of one request, and its outcomes."""
    experiments = [Experiment.parse(name) for name in names]
    start = time.perf_counter()
    outcomes = list(session.run_many(experiments))
    return time.perf_counter() - start, outcomes


def measure(snapshot: Path, device: str, *, deterministic: bool) -> dict[str, Any]:
    """One session: bare passes, single experiments, groups of 8, and baseline + 5 methods."""
    start = time.perf_counter()
    with ReplaySession.open(snapshot, device=device, deterministic=deterministic) as session:
        opened = time.perf_counter() - start
        session.bare_seconds(2)
        timed(session, NAMES)  # warms up; the first baseline is measured nowhere below
        bare = statistics.median(session.bare_seconds(REPEATS))
        own = statistics.median(timed(session, (OWN_FORWARD,))[0] for _ in range(REPEATS)) / 2
        single = statistics.median(timed(session, (LOSS_ONLY,))[0] for _ in range(REPEATS))
        eight = statistics.median(timed(session, (LOSS_ONLY,) * 8)[0] for _ in range(REPEATS)) / 8
        sweep = statistics.median(timed(session, NAMES)[0] for _ in range(REPEATS))
        info = session.info
    needed = 4  # one forward for baseline and loss-only methods, one for each routing method
    return {
        "device": info.device,
        "dtype": info.dtype,
        "deterministic": deterministic,
        "parameters": info.parameters,
        "open_seconds": opened,
        "bare_pass_seconds": bare,
        "own_forward_replay_over_bare": own / bare,
        "loss_only_alone_over_bare": single / bare,
        "loss_only_of_8_over_bare": eight / bare,
        "baseline_and_5_methods_over_needed_passes": sweep / (needed * bare),
    }


def main() -> None:
    """Measure, write OUT and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    auto = "cuda" if has_cuda() else "cpu"
    device = auto if options.device == "auto" else options.device
    with tempfile.TemporaryDirectory() as scratch:
        snapshot = synthetic.write(Path(scratch), SHAPES[options.shape])
        rows = [measure(snapshot, device, deterministic=d) for d in (True, False)]
    document = {"benchmark": "sweep", "environment": environment(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
