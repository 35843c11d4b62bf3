"""What sixty experiments cost against one bare forward and backward of the same engine, in one run.

    python benchmarks/sweep60.py OUT.json [--case DIR] [--device auto|cpu|cuda] [--rounds N]

The sixty are those of ``sixty.py``, asked for in one request of a session whose baseline is known.
Bare passes are measured before and after each round, and the best of each counts: a machine that
is shared slows both, and a long request more often than a short one. On a CPU the ratio of the
workers' CPU seconds is given too, which other programs move less. In the same run: the engine's
bare pass over plain torch's on the shape of ``plain_torch.py``, and what a gradient's figures cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from environment import environment
from plain_torch import compare
from sixty import LOSS_ONLY, OTHERS, ROUTING, SIXTY

from replay_lib.case import Case, builtin_cases
from replay_lib.engine.comm import Comm
from replay_lib.engine.cosine import Unpatched, cosine_to
from replay_lib.engine.gradients import GradientBuffers, measure
from replay_lib.engine.machine import has_cuda
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.snapshot import read_tensors

CASE = "zoo-natural"  # of the embedded cases, the one on which the sixty differ most
PASSES = 5
AIM = 48.0


def worker_cpu_seconds() -> float:
    """CPU seconds that the processes below this one have used so far."""
    return sum(sum(p.cpu_times()[:2]) for p in psutil.Process().children(recursive=True))


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, the workers' CPU seconds and the result of ``work``."""
    cpu, start = worker_cpu_seconds(), time.perf_counter()
    result = work()
    return time.perf_counter() - start, worker_cpu_seconds() - cpu, result


def sixty_over_bare(snapshot: Path, device: str, rounds: int) -> dict[str, Any]:
    """The ratio and what it is made of."""
    experiments = [Experiment.parse(text) for text in SIXTY]
    bare: list[float] = []
    bare_cpu: list[float] = []
    sweeps: list[tuple[float, float, list[Outcome]]] = []
    with ReplaySession.open(snapshot, device=device) as session:
        session.run(Experiment.baseline())
        session.bare_seconds(2)  # warms up

        def passes() -> None:
            _, cpu, seconds = timed(lambda: session.bare_seconds(PASSES))
            bare.extend(seconds)
            bare_cpu.append(cpu / PASSES)

        passes()
        for _ in range(rounds):
            sweeps.append(timed(lambda: list(session.run_many(experiments))))
            passes()
        info = session.info
    wall, _, outcomes = min(sweeps, key=lambda s: s[0])
    ratio = wall / min(bare)
    row: dict[str, Any] = {
        "case": snapshot.parents[1].name,
        "device": info.device,
        "dtype": info.dtype,
        "deterministic": info.deterministic,
        "parameters": info.parameters,
        "experiments": len(outcomes),
        "different_gradients": len({o.digest for o in outcomes}),
        "bare_pass_seconds": min(bare),
        "bare_pass_seconds_median": statistics.median(bare),
        "sixty_seconds": [wall for wall, _, _ in sweeps],
        "sixty_over_bare": ratio,
        "aim": AIM,
        "within_aim": ratio <= AIM,
        "parts_over_bare": parts(outcomes, min(bare)),
    }
    if info.device == "cpu":
        row["sixty_over_bare_cpu_seconds"] = min(cpu for _, cpu, _ in sweeps) / min(bare_cpu)
    return row


def parts(outcomes: Sequence[Outcome], bare: float) -> dict[str, float]:
    """The three kinds' replay seconds over a bare pass; patching before the first is in none."""
    kinds = {"loss_only": LOSS_ONLY, "routing": ROUTING, "others": OTHERS}
    ends, found = 0, {}
    for kind, names in kinds.items():
        found[kind] = sum(o.seconds for o in outcomes[ends : ends + len(names)]) / bare
        ends += len(names)
    return found


def measuring(snapshot: Path, device: str) -> dict[str, float]:
    """Seconds of norms and digest, and of the cosine, of a gradient of the model's size."""
    parameters = {n: t.to(device) for n, t in read_tensors(snapshot).items()}
    buffers = GradientBuffers(parameters)
    buffers.flat.copy_(torch.randn(buffers.flat.numel(), device=device))
    comm = Comm(rank=0, world=1, device=torch.device(device))
    measured = measure(buffers, {}, comm)
    kept = GradientBuffers(parameters)
    kept.flat.copy_(buffers.flat)
    unpatched = Unpatched.keep(kept, measured.norm, torch.device(device))

    def best(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(12):
            start = time.perf_counter()
            work()  # both end in a number on the host
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return {
        "norms_and_digest_seconds": best(lambda: measure(buffers, {}, comm)),
        "cosine_seconds": best(lambda: cosine_to(unpatched, buffers, measured, comm)),
    }


def main() -> None:
    """Measure, write OUT and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", type=Path, default=builtin_cases() / CASE)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    auto = "cuda" if has_cuda() else "cpu"
    device = auto if options.device == "auto" else options.device
    if device == "cpu":  # one thread here, in the workers and in plain torch
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    snapshot = Case.open(options.case).snapshot
    row = sixty_over_bare(snapshot, device, options.rounds)
    row |= measuring(snapshot, device)
    print(json.dumps(row, indent=1), flush=True)  # the rest takes two more sessions
    shape = "large" if device == "cuda" else "small"
    document = {
        "benchmark": "sweep60",
        "environment": environment(),
        "rows": [row],
        "plain_torch": compare(shape, device),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["plain_torch"], indent=1))


if __name__ == "__main__":
    main()
