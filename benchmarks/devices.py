"""The embedded step on every device here, float32 and bfloat16: norms, bit-equality, seconds.

    python benchmarks/devices.py OUT.json [--snapshot DIR]

Two sessions for each device and precision: their gradients must be bit-equal. Norms are compared
with the recorded one and with the CPU's, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from environment import environment
from tabulate import tabulate

from replay_lib.engine.machine import has_cuda
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.run import RECORDED_METHODS
from replay_lib.snapshot import open_snapshot

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
NAMES = ("baseline", *RECORDED_METHODS)


def one_session(snapshot: Path, device: str, precision: str, deterministic: bool) -> dict[str, Any]:
    """Norms, digests and seconds of the baseline and the recorded methods."""
    start = time.perf_counter()
    with ReplaySession.open(
        snapshot, device=device, precision=precision, deterministic=deterministic
    ) as session:
        opened = time.perf_counter() - start
        outcomes = list(session.run_many([Experiment.parse(name) for name in NAMES]))
        bare = session.bare_seconds(4)[1:]  # the first one warms up
    return {
        "device": session.info.device,
        "precision": precision,
        "deterministic": deterministic,
        "open_seconds": round(opened, 2),
        "bare_pass_seconds": round(min(bare), 4),
        "norms": {o.experiment.name: o.grad_norm_preclip for o in outcomes},
        "digests": {o.experiment.name: o.digest for o in outcomes},
    }


def measure(snapshot: Path) -> list[dict[str, Any]]:
    """All devices and precisions; each deterministic row was run twice."""
    recorded = open_snapshot(snapshot).grad_norm_preclip
    assert recorded is not None
    rows: list[dict[str, Any]] = []
    for device in ("cpu", "cuda") if has_cuda() else ("cpu",):
        for precision in ("float32", "bfloat16"):
            first = one_session(snapshot, device, precision, True)
            again = one_session(snapshot, device, precision, True)
            free = one_session(snapshot, device, precision, False)
            norm = first["norms"]["baseline"]
            first["two_sessions_bit_equal"] = first["digests"] == again["digests"]
            first["free_bare_pass_seconds"] = free["bare_pass_seconds"]
            first["relative_to_recorded"] = abs(norm - recorded) / recorded
            cpu = next((r for r in rows if r["precision"] == precision), first)
            first["relative_to_cpu"] = {
                name: abs(value - cpu["norms"][name]) / cpu["norms"][name]
                for name, value in first["norms"].items()
            }
            rows.append(first)
            print(f"{first['device']} {precision}: {norm!r}", flush=True)
    return rows


def main() -> None:
    """Measure, write OUT and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--snapshot", type=Path, default=EMBEDDED)
    options = parser.parse_args()
    rows = measure(options.snapshot)
    document = {"benchmark": "devices", "environment": environment(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    shown = [
        [
            r["device"],
            r["precision"],
            r["norms"]["baseline"],
            r["relative_to_recorded"],
            max(r["relative_to_cpu"].values()),
            r["two_sessions_bit_equal"],
            r["open_seconds"],
        ]
        for r in rows
    ]
    heads = [
        "device",
        "precision",
        "norm",
        "off recorded",
        "off cpu (worst)",
        "bit-equal",
        "open s",
    ]
    print(tabulate(shown, heads, floatfmt=".7g"))


if __name__ == "__main__":
    main()
