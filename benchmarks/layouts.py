"""Steps that Megatron-Core recorded on parallel layouts, replayed on these and on other layouts.

    python benchmarks/layouts.py OUT.json [--device cpu|cuda] [--size tiny|half-billion]
        [--precision float32 bfloat16] [--snapshot DIR] [--layouts dp=4 ep=2 ...]
    python benchmarks/layouts.py OUT.json --as-recorded DIR ... [--device cpu|cuda]
        [--layouts cp=2,ep=2 ...]

Trains once a precision (or takes the one-rank snapshot DIR), records its step on each layout that
the machine can run, and replays each on one rank and on the other given layouts: norms against the
recorded one, norms of parameters and of a method at each seam against the replay on one rank, two
runs, seconds, peak memory a rank. OUT is written after each precision.

The second form records nothing: snapshots of any origin are replayed as they are, on one rank and
on each layout. A layout that a snapshot cannot be replayed on is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environment import environment

from replay_lib.case import Case
from replay_lib.engine.machine import cuda_devices
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import UnsupportedModelError, UsageError
from replay_lib.snapshot import open_snapshot
from replay_lib.writing import replace_file
from replay_lib.zoo import make_spike
from replay_lib.zoo.native import LayoutStep, parse_parallel, record_steps
from replay_lib.zoo.recipe import find_recipe

ROOT = Path(__file__).resolve().parents[1]
#: Recorded on, and replayed on; the first replay is what the others are compared with.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp=4": ("dp=1", "dp=2", "dp=4"),
    "dp=2": ("dp=1", "dp=2", "ep=2"),
    "ep=2": ("dp=1", "ep=2"),
    "tp=2": ("dp=1", "tp=2"),
    "pp=2": ("dp=1", "pp=2"),
    "pp=2,vpp=2": ("dp=1", "pp=2"),
    "cp=2": ("dp=1", "cp=2"),
    "tp=2,ep=2": ("dp=1", "tp=2,ep=2"),
    "ep=4": ("dp=1", "ep=2", "ep=4"),
    "tp=2,pp=2": ("dp=1", "tp=2", "tp=2,pp=2"),
}
#: Where a snapshot that is given goes after one rank, unless others are named.
ANY = ("dp=2", "ep=2", "tp=2", "pp=2", "cp=2", "tp=2,ep=2", "cp=2,ep=2")
SEAMS = {
    "weights": "seam_examples:scaled_router",
    "model": "seam_examples:scaled_topk",
    "routing": "seam_examples:even_rows_replay",
    "batch": "seam_examples:smaller_advantage",
    "settings": "seam_examples:sequence_mean",
    "token weights": "seam_examples:weighted_tokens",
}


def tell(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def replayed(snapshot: Path, device: str, layout: str) -> tuple[list[Outcome], dict[str, Any]]:
    """Baseline and a method at each seam in one session, the baseline again in another one."""
    start = time.perf_counter()
    with ReplaySession.open(snapshot, device=device, layout=layout) as session:
        opened = time.perf_counter() - start
        base = session.run(Experiment.baseline())
        outcomes = [base, *session.run_many([Experiment.parse(m) for m in SEAMS.values()])]
        again = session.run(Experiment.baseline())
        bare = session.bare_seconds(4)[1:]  # the first one warms up
        info, peaks = session.info, session.peak_memory()
    with ReplaySession.open(snapshot, device=device, layout=layout) as session:
        another = session.run(Experiment.baseline())
    return outcomes, {
        "replayed_on": layout,
        "fidelity": info.fidelity,
        "device": info.device,
        "norm": base.grad_norm_preclip,
        "two_runs_bit_equal": again.digest == base.digest,
        "two_sessions_bit_equal": another.digest == base.digest,
        "open_seconds": round(opened, 1),
        "replay_seconds": round(again.seconds, 4),
        "bare_pass_seconds": round(min(bare), 4),
        "peak_memory_gib": [round(b / 2**30, 2) for b in peaks],
    }


def compared(outcomes: Sequence[Outcome], first: Sequence[Outcome]) -> dict[str, Any]:
    """How far norms are from those of the replay on one rank."""
    mine, one = outcomes[0].param_norms, first[0].param_norms
    assert set(mine) == set(one), sorted(set(mine) ^ set(one))
    worst, name = max((abs(mine[n] / one[n] - 1) if one[n] else abs(mine[n]), n) for n in one)
    pairs = zip(SEAMS, outcomes[1:], first[1:], strict=True)
    return {
        "worst_parameter": {"name": name, "off_one_rank": worst},
        "seams_off_one_rank": {
            seam: abs(a.grad_norm_preclip / b.grad_norm_preclip - 1) for seam, a, b in pairs
        },
    }


def measure(source: Path, layouts: Sequence[str], options: Any, precision: str) -> list[Any]:
    """Rows of one precision: record on all layouts, then replay."""
    one_rank = open_snapshot(source).grad_norm_preclip
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        steps = [
            LayoutStep(source, Path(scratch) / text / source.name, parse_parallel(text))
            for text in layouts
        ]
        start = time.perf_counter()
        made = record_steps(steps, device=options.device)
        tell(f"recording on {len(steps)} layouts took {time.perf_counter() - start:.0f} s")
        for text, step, told in zip(layouts, steps, made, strict=True):
            head = {"precision": precision, "recorded_on": text, "recorded_norm": told["norm"]}
            head["recorded_off_training"] = abs(told["norm"] / one_rank - 1)
            rows += replays(step.target, LAYOUTS[text], options.device, head)
    return rows


def replays(
    snapshot: Path, targets: Sequence[str], device: str, head: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row a layout of ``targets``, all compared with the first of them."""
    rows, first = [], []
    for target in targets:
        try:
            outcomes, row = replayed(snapshot, device, target)
        except (UnsupportedModelError, UsageError) as error:
            rows.append(head | {"replayed_on": target, "refused": str(error)})
        else:
            first = first or outcomes
            row = head | row | {"off_recorded": abs(row["norm"] / head["recorded_norm"] - 1)}
            rows.append(row | compared(outcomes, first))
        tell(json.dumps(rows[-1]))
    return rows


def as_recorded(path: Path, layouts: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Rows of the snapshot, or of the case, in ``path``."""
    case = Case.open(path)
    snapshot = open_snapshot(case.snapshot)
    sizes = {axis: getattr(snapshot.parallel, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"
    norm = snapshot.grad_norm_preclip
    head = {"snapshot": case.name, "recorded_on": text, "recorded_norm": norm}
    return replays(snapshot.path, ("dp=1", *layouts), device, head)


def source_of(options: Any, precision: str, scratch: Path) -> Path:
    """The step recorded on one rank: given, or made by training."""
    if options.snapshot is not None:
        return Path(options.snapshot).resolve()
    recipe = find_recipe(options.size, device=options.device, precision=precision)
    out = scratch / precision
    made = make_spike("poisoned-row", seed=1, out=out, cache=out / "c", recipe=recipe, tell=tell)
    return out / str(made["snapshot"])


def main() -> None:
    """Measure and write OUT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument("--snapshot", type=Path)
    parser.add_argument("--as-recorded", type=Path, nargs="+", default=[], metavar="DIR")
    parser.add_argument("--layouts", nargs="+")
    options = parser.parse_args()
    known = None if options.as_recorded else list(LAYOUTS)
    odd = [] if known is None else sorted({*(options.layouts or ())} - {*known})
    if odd:
        parser.error(f"--layouts: found {' '.join(odd)}, expected some of {' '.join(LAYOUTS)}")
    sys.path.append(str(ROOT / "tests"))  # sessions look there for the methods at the seams
    room = cuda_devices() if options.device == "cuda" else 4
    asked = options.layouts or known or ANY
    layouts = [text for text in asked if parse_parallel(text).world_size <= room]
    os.environ.setdefault("OMP_NUM_THREADS", "1" if options.device == "cpu" else "8")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Any] = []
    for path in options.as_recorded:
        rows += as_recorded(path, layouts, options.device)
        write(options, rows)
    with tempfile.TemporaryDirectory() as scratch:
        for precision in [] if options.as_recorded else options.precision:
            source = source_of(options, precision, Path(scratch))
            rows += measure(source, layouts, options, precision)
            write(options, rows)


def write(options: Any, rows: list[Any]) -> None:
    """Put what is measured so far into OUT."""
    about = {} if options.as_recorded else {"size": options.size}
    document = {"benchmark": "layouts", **about, "environment": environment(), "rows": rows}
    replace_file(options.out.absolute(), (json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
