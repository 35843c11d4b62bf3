"""How far the baseline's norm moves between replays of one session, on every device here.

    python benchmarks/repeats.py OUT.json [--repeats N] [--case NAME ...]

Each row is one session: a case, a device, a dtype, with or without deterministic algorithms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from environment import environment
from tabulate import tabulate

from replay_lib.case import Case
from replay_lib.engine.machine import has_cuda
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.noise import spread

CASES = Path(__file__).resolve().parents[1] / "spike_cases"


def one_session(
    case: Case, device: str, precision: str, *, deterministic: bool, repeats: int
) -> dict[str, Any]:
    """Spread of ``repeats`` baselines, each with a forward of its own, and of their digests."""
    with ReplaySession.open(
        case.snapshot, device=device, precision=precision, deterministic=deterministic
    ) as session:
        outcomes = [session.run(Experiment.baseline()) for _ in range(repeats)]
    norms = [o.grad_norm_preclip for o in outcomes]
    return {
        "case": case.name,
        "device": session.info.device,
        "precision": precision,
        "deterministic": deterministic,
        "repeats": repeats,
        "norm": norms[0],
        "spread": spread(norms),
        "digests": len({o.digest for o in outcomes}),
    }


def main() -> None:
    """Measure, print a table, write the rows with their environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--case", nargs="+", default=["axrl-plain-step85", "zoo-natural"])
    chosen = parser.parse_args()
    rows = [
        one_session(
            Case.open(CASES / name),
            device,
            precision,
            deterministic=deterministic,
            repeats=chosen.repeats,
        )
        for name in chosen.case
        for device in (("cuda", "cpu") if has_cuda() else ("cpu",))
        for precision in ("float32", "bfloat16")
        for deterministic in ((True, False) if device == "cuda" else (False,))
    ]
    print(tabulate([list(row.values()) for row in rows], headers=list(rows[0])))
    document = {"benchmark": "repeats", "environment": environment(), "rows": rows}
    chosen.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
