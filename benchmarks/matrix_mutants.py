"""Faults that the suite of spikes itself notices: the embedded cases under every method.

    pip install cosmic-ray==8.7.0
    python benchmarks/matrix_mutants.py OUT.json [--jobs N] [--again]
    python benchmarks/matrix_mutants_table.py      # the tables of docs/mutation.md

Mutants are drawn by a fixed seed from all that ``mutation.py`` makes of the code that computes a
replayed gradient (``MODULES`` without ``LEFT_OUT``), until sixty are of lines that the suite gets
to. The others (of several ranks, of what a sound snapshot never meets) cannot be noticed by it:
they are listed and not run. Each of the sixty is written into a copy of the tree that holds two
cases, and ``pytest tests/test_spike_cases.py -x`` is run there as a user would: every registered
method on both spikes and the quiet control, on the CPU, against verdicts and baselines, which are
written without a mutant first, so that figures are compared in any environment. Red is noticed.
``--again`` goes on from OUT: what was not run yet, then what survived.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutation import COPIED, OPERATORS, ROOT, Mutant, mutants
from reached_lines import reached, watch

SEED = 5  # of the sixty
COUNT = 60
#: One snapshot of AXRL's own writer (two ranks), one of a run that diverged by itself: on no other
#: pair do more methods act.
CASES = ("axrl-plain-step85", "zoo-natural")
#: What computes a replayed gradient: loss, routes, micro-batches and packing, the step that goes
#: forward and backward, how gradients are summed. ``loss/settings.py`` only reads settings.
LOSS = ("aggregate", "control", "denominator", "distillation", "filters", "inputs", "logits")
LOSS += ("policy", "ratios", "total")
ENGINE = ("dispatch", "forward", "gradients", "routes", "sharing", "step")
MODULES = (
    *(f"replay_lib/loss/{name}.py" for name in LOSS),
    *(f"replay_lib/{name}.py" for name in ("microbatch", "packing", "routing")),
    *(f"replay_lib/engine/{name}.py" for name in ENGINE),
)
#: Functions that compute no figure of a result: by what they refuse, what they tell of bits, counts
#: or metrics. The first are held by tests of their own (``mutation.py`` plants faults in those).
LEFT_OUT = {
    "refuses": "_check_fit _check_log_prob _check_bounds _checked _check_dtype _check_ids _refuse "
    "check check_routes check_shape",
    "tells bits": "digest fingerprint _block_sums _table",
    "counts": "_own_share",
    "metrics": "_filter_metrics _ratio_metrics _share _read_out _CLIPPED _surrogate_term "
    "_LEAST_ADVANTAGE",
    "tells ranks apart": "Kind",
}
#: Left out too: what ``mutation.py`` found to be the same program for every test of its module;
#: lines about ranks, since the suite runs on one; axis 1 for -1, which of ``[B, T]`` is the same
#: one; how a dataclass is declared.
SAME = ROOT / "benchmarks/results/mutation.json"
RANKS = re.compile(r"\b(world|ranks?)\b")
LAST_AXIS = re.compile(r"dim=-1|unsqueeze\(-1")
OUT_OF_POOL = frozenset(name for names in LEFT_OUT.values() for name in names.split())
SUITE = ("-m", "pytest", "tests/test_spike_cases.py", "-x", "-q", "--device=cpu")
TIMEOUT_S = 1200  # of one run: the suite takes a minute or two on a quiet machine
OUTCOMES = {0: "survived", 1: "killed"}  # of pytest's exit codes; another one: nothing could start
UNREACHED = "unreached"
FOUND = ("seconds", "red")
_RED = re.compile(r"^(?:FAILED|ERROR) \S+::(\S+)", re.MULTILINE)


def shuffled() -> list[Mutant]:
    """Every mutant of the modules, in the order in which they are drawn."""
    modules = json.loads(SAME.read_text(encoding="utf-8"))["modules"]
    same = {
        (name, m["where"], m["before"], m["after"])
        for name, found in modules.items()
        for m in found["survivors"]
    }
    every = [
        m
        for name in MODULES
        for m in mutants(name, (ROOT / name).read_text(encoding="utf-8"))
        if in_pool(m) and (name, m.where, m.before, m.after) not in same
    ]
    random.Random(SEED).shuffle(every)
    return every


def in_pool(mutant: Mutant) -> bool:
    """Whether it may change a figure of the suite, as far as its form tells."""
    axis = mutant.operator == "ReplaceUnaryOperator_Delete_USub" and LAST_AXIS.search(mutant.before)
    told = {mutant.where, mutant.before.partition(" = ")[0]} & OUT_OF_POOL
    declared = mutant.before.startswith("@dataclass")
    return not (axis or told or declared or RANKS.search(mutant.before))


def drawn(every: list[Mutant], lines: dict[str, list[int]]) -> list[Mutant]:
    """The first of ``every``, as many as are needed for sixty on ``lines``."""
    on_lines = (i for i, m in enumerate(every, start=1) if m.line in lines[m.module])
    return every[: next(itertools.islice(on_lines, COUNT - 1, None))]


def fill(copy: Path) -> Path:
    """A tree of its own with the two cases."""
    for name in (*COPIED, "pyproject.toml", *(f"spike_cases/{case}" for case in CASES)):
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    return copy


def give_baselines(copies: list[Path]) -> None:
    """Baselines of this environment in every copy, from one run without a mutant."""
    suite(copies[0], "--update-baselines")
    for case, copy in itertools.product(CASES, copies[1:]):
        own = Path("spike_cases") / case / "baselines"
        shutil.copytree(copies[0] / own, copy / own, dirs_exist_ok=True)


def suite(copy: Path, *more: str) -> dict[str, Any]:
    """Run the suite in ``copy``: outcome, seconds, and the first red test."""
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    start, log = time.monotonic(), copy / "log"
    with log.open("w") as file:
        # a group of its own: the suite starts workers, and a run that hangs is ended with them
        child = subprocess.Popen(
            [sys.executable, *SUITE, *more],
            cwd=copy,
            env={**os.environ, **own},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome = OUTCOMES.get(child.wait(TIMEOUT_S), "broken")
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            outcome = "timeout"
    red = _RED.search(log.read_text(encoding="utf-8", errors="replace"))
    seconds = round(time.monotonic() - start, 1)
    return {"outcome": outcome, "seconds": seconds, "red": red[1] if red else None}


def plant(copy: Path, mutant: Mutant) -> dict[str, Any]:
    """The suite with one fault in it; the file is as it was afterwards."""
    target = copy / mutant.module
    source = target.read_text(encoding="utf-8")
    target.write_text(mutant.code, encoding="utf-8")
    try:
        return suite(copy)
    finally:
        target.write_text(source, encoding="utf-8")


def measure(out: Path, document: dict[str, Any], every: list[Mutant], copies: list[Path]) -> None:
    """Run what was not run, then what survived, and write the document after each run."""
    rows, writing = document["mutants"], threading.Lock()
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def one(number: int) -> None:
        copy, mutant = free.get(), every[number]
        try:
            found = plant(copy, mutant)
        finally:
            free.put(copy)
        with writing:
            rows[number] |= found
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            told = f"{mutant.module}:{mutant.line}: {mutant.before}  ->  {mutant.after}"
            print(f"{number} {found['outcome']} {found['seconds']} s  {told}", flush=True)

    todo = [i for i, row in enumerate(rows) if row["outcome"] is None]
    todo += [i for i, row in enumerate(rows) if row["outcome"] == "survived"]
    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(one, todo))


def fresh(every: list[Mutant], copy: Path) -> dict[str, Any]:
    """A document of which nothing was run but the suite without a mutant."""
    from environment import environment

    watch(copy)
    unchanged = suite(copy)
    if unchanged["outcome"] != "survived":
        raise SystemExit(f"red without a mutant\n{(copy / 'log').read_text()}")
    lines = reached(copy, MODULES)
    pool = {name: [m for m in every if m.module == name] for name in MODULES}
    return {
        "command": "python benchmarks/matrix_mutants.py OUT.json, then --again",
        "suite": f"python {' '.join(SUITE)}",
        "cases": list(CASES),
        "seed": SEED,
        "left_out": LEFT_OUT,
        "cosmic_ray": importlib.metadata.version("cosmic-ray"),
        "operators": [name.removeprefix("core/") for name in OPERATORS],
        "environment": environment(),
        "sources": sources(),
        "pool": {
            name: {"mutants": len(own), "reached": sum(m.line in lines[name] for m in own)}
            for name, own in pool.items()
        },
        "mutants": [row(m, m.line in lines[m.module]) for m in drawn(every, lines)],
    }


def row(mutant: Mutant, is_reached: bool) -> dict[str, Any]:
    """A mutant that was not run; ``outcome`` None means that it will be."""
    names = ("module", "where", "line", "operator", "before", "after")
    outcome = {"outcome": None if is_reached else UNREACHED}
    return {n: getattr(mutant, n) for n in names} | outcome | dict.fromkeys(FOUND)


def sources() -> dict[str, str]:
    """The sha256 of every module that mutants are made of."""
    return {m: hashlib.sha256((ROOT / m).read_bytes()).hexdigest() for m in MODULES}


def main() -> None:
    """Measure and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (default: 1)")
    parser.add_argument("--again", action="store_true", help="go on from OUT")
    options = parser.parse_args()
    every = shuffled()
    with tempfile.TemporaryDirectory(prefix="matrix-mutants-") as place:
        copies = [fill(Path(place) / str(job)) for job in range(options.jobs)]
        give_baselines(copies)
        if options.again:
            document = json.loads(options.out.read_text(encoding="utf-8"))
            if document["sources"] != sources():
                raise SystemExit("a source is not the one that was measured")
        else:
            document = fresh(every, copies[0])
        measure(options.out, document, every, copies)


if __name__ == "__main__":
    main()
