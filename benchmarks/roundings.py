"""How far the norm of a step moves when its weights move by less than a rounding of bfloat16.

    python benchmarks/roundings.py OUT.json [--seeds 4] [CASE ...]

Every weight is multiplied by 1 + u / 512, u uniform in [-1, 1]: at most one rounding of bfloat16
(8 bits of mantissa), at random. Everything else stays in the recorded precision, so what moves the
norm is how the step depends on its weights, not arithmetic. Programs that round in different
places cannot agree on this step any better in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor

from replay_lib.case import Case, builtin_cases, discover
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.patch import Patch, weights_patch
from replay_lib.writing import replace_file

ROUNDING = 2.0**-9


def moved(seed: int = 0) -> Patch:
    """Weights, each moved by at most one rounding of bfloat16."""

    def apply(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        changed = {}
        for number, (name, value) in enumerate(sorted(weights.items())):
            generator = torch.Generator().manual_seed(1000 * seed + number)
            share = torch.rand(value.shape, generator=generator).to(value.device) * 2 - 1
            changed[name] = (value.float() * (1 + ROUNDING * share)).to(value.dtype)
        return changed

    return weights_patch(apply)


def measure(case: Case, seeds: int) -> dict[str, Any]:
    """Norms over the baseline's, minus 1, with stored and with carried old log-probabilities."""
    with ReplaySession.open(case.snapshot, device="cpu") as session:
        base = session.run(Experiment.baseline())
        asked = [Experiment.parse(f"roundings:moved:seed={seed}") for seed in range(seeds)]
        outcomes = list(session.run_many(asked))
    return {
        "case": case.name,
        "norm": base.grad_norm_preclip,
        "moves": [off(o.grad_norm_preclip, base) for o in outcomes],
        "moves_carried": [off(o.grad_norm_preclip_carried, base) for o in outcomes],
        "cosines": [o.cosine for o in outcomes],
    }


def off(norm: float | None, base: Outcome) -> float | None:
    """Signed and relative."""
    return None if norm is None else norm / base.grad_norm_preclip - 1


def main() -> None:
    """Measure and write OUT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))  # sessions look there for the patch
    cases = [Case.open(path) for path in options.cases] or discover(builtin_cases())
    rows = []
    for case in cases:
        rows.append(measure(case, options.seeds))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    document = {"benchmark": "roundings", "environment": environment(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.out.absolute(), (json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
