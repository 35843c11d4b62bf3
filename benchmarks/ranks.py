"""One step on many layouts: how far norms are from the one-rank replay's, seam by seam.

    python benchmarks/ranks.py OUT.json [--device cuda] [--layouts "tp=2 ep=2"] [SNAPSHOT ...]

For each snapshot (the embedded one and one of the zoo where none is named) one session a layout. A
layout that a snapshot cannot be replayed on is listed with the reason. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from environment import environment
from tabulate import tabulate

from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import UnsupportedModelError, UsageError

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "spike_cases"
SNAPSHOTS = (
    CASES / "axrl-plain-step85/snapshot/iter_0000085",
    CASES / "zoo-natural/snapshot/iter_0000061",
)
LAYOUTS = "dp=2 ep=2 tp=2 pp=2 cp=2 tp=2,ep=2 cp=2,ep=2"
#: One method at each seam: weights, model fields, routing, batch, settings, token weights.
NAMES = (
    "baseline",
    "seam_examples:scaled_router",
    "seam_examples:scaled_topk",
    "seam_examples:even_rows_replay",
    "seam_examples:smaller_advantage",
    "seam_examples:sequence_mean",
    "seam_examples:weighted_tokens",
)


def replayed(snapshot: Path, device: str, layout: str) -> tuple[list[Outcome], dict[str, Any]]:
    """All outcomes on one layout, and what was seen of the session."""
    start = time.perf_counter()
    with ReplaySession.open(snapshot, device=device, layout=layout) as session:
        opened = time.perf_counter() - start
        outcomes = list(session.run_many([Experiment.parse(name) for name in NAMES]))
        again = session.run(Experiment.baseline())
        bare = session.bare_seconds(4)[1:]  # the first one warms up
    return outcomes, {
        "fidelity": session.info.fidelity,
        "device": session.info.device,
        "dtype": session.info.dtype,
        "open_seconds": round(opened, 1),
        "bare_pass_seconds": round(min(bare), 4),
        "repeats_bit_for_bit": again.digest == outcomes[0].digest,
    }


def difference(outcomes: list[Outcome], one: list[Outcome]) -> dict[str, Any]:
    """Largest relative differences from the one-rank replay, over all experiments."""
    pairs = list(zip(outcomes, one, strict=True))
    return {
        "norm": max(abs(a.grad_norm_preclip / b.grad_norm_preclip - 1) for a, b in pairs),
        "param_norm": max(
            abs(a.param_norms[k] - n) / max(n, 1e-6 * b.grad_norm_preclip)
            for a, b in pairs
            for k, n in b.param_norms.items()
        ),
        "same_counts": all(a.touched == b.touched for a, b in pairs),
    }


def measure(snapshot: Path, device: str, layouts: list[str]) -> list[dict[str, Any]]:
    """One row a layout, the one-rank replay first."""
    one, seen = replayed(snapshot, device, "dp=1")
    name = snapshot.parents[1].name if snapshot.parent.name == "snapshot" else snapshot.name
    rows: list[dict[str, Any]] = [{"snapshot": name, "layout": "dp=1", **seen}]
    for layout in layouts:
        try:
            outcomes, seen = replayed(snapshot, device, layout)
        except (UnsupportedModelError, UsageError) as error:
            rows.append({"snapshot": name, "layout": layout, "refused": str(error)})
            continue
        rows.append({"snapshot": name, "layout": layout, **seen, **difference(outcomes, one)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    shown = []
    for row in rows:
        if "refused" in row:
            shown.append([row["snapshot"], row["layout"], "refused", "", "", "", "", ""])
            continue
        figures = [f"{row[k]:.1e}" if k in row else "-" for k in ("norm", "param_norm")]
        repeats = "yes" if row["repeats_bit_for_bit"] else "no"
        counts = {True: "yes", False: "no"}.get(row.get("same_counts"), "-")
        cells = [row["snapshot"], row["layout"], row["fidelity"], *figures, counts, repeats]
        shown.append([*cells, f"{row['bare_pass_seconds']:.3f}"])
    heads = ["snapshot", "layout", "fidelity", "norm off by", "parameter's norm off by"]
    heads += ["counts equal", "repeats bit for bit", "bare pass, s"]
    return tabulate(shown, headers=heads, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("snapshots", type=Path, nargs="*", default=list(SNAPSHOTS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layouts", default=LAYOUTS, help="separated by blanks")
    given = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))  # where seam_examples is
    rows: list[dict[str, Any]] = []
    for snapshot in given.snapshots:
        rows += measure(snapshot.resolve(), given.device, given.layouts.split())
    document = {"environment": environment(), "rows": rows}
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(table(rows) + "\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
