"""Seconds and memory of ``spike-replay analyze`` on 512 rows of 16,384 tokens on 4 ranks.

    python benchmarks/analyze.py [--rows 512] [--length 16384] [--ranks 4] [--layers 4] [--topk 2]

The snapshot is made in a temporary directory. The command runs in a process of its own, from start
to exit: its wall-clock and processor seconds, and the most memory it held. Limits: 60 s and 4 GiB.
It has one thread: processor seconds are then what a core of an idle machine takes, and threads that
wait for each other on a busy one are not counted as work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from environment import environment
from synthetic import EMBEDDED, ROOT

from replay_lib.batch import RankBatch
from replay_lib.snapshot import open_snapshot, read_content, write_snapshot

RESULTS = ROOT / "benchmarks/results/analyze-cpu.json"
SECONDS, GIB = 60.0, 4.0
PROMPT, GROUP, EXPERTS = 2048, 8, 64


def main() -> None:
    """Make the snapshot, analyze it, write the figures; exit status 1 beyond a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("rows", 512), ("length", 16384), ("ranks", 4), ("layers", 4), ("topk", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--results", type=Path, default=RESULTS)
    wanted = parser.parse_args()
    shape = {k: v for k, v in vars(wanted).items() if k != "results"}
    with tempfile.TemporaryDirectory(prefix="spike-replay-") as home:
        path = write(Path(home), **shape)
        size = sum(f.stat().st_size for f in path.iterdir())
        row = {**shape, "bytes": size, **measure(path)}
    keep(wanted.results, row)
    print(json.dumps(row, indent=1))
    ok = row["cpu_seconds"] <= SECONDS and row["peak_gib"] <= GIB
    sys.exit(0 if ok else 1)


def write(home: Path, *, rows: int, length: int, ranks: int, layers: int, topk: int) -> Path:
    """The snapshot; its model's weights are the embedded one's, which nothing here reads."""
    content = read_content(open_snapshot(EMBEDDED))
    worker = dict(content.worker_config) | {"dp_size": ranks, "global_batch_size": rows}
    run_config = yaml.safe_load(content.run_config)
    run_config["model"] |= {
        "num_layers": layers,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": topk,
    }
    each = rows // ranks
    batches = tuple(_batch(rank, each, length, layers, topk) for rank in range(ranks))
    changed = replace(
        content,
        worker_config=worker,
        run_config=yaml.safe_dump(run_config),
        batches=batches,
        grad_info=dict.fromkeys(range(ranks), content.grad_info[0]),
        handles=None,
    )
    return write_snapshot(home / "iter_0000085", changed).path


def _batch(rank: int, rows: int, length: int, layers: int, topk: int) -> RankBatch:
    generator = torch.Generator().manual_seed(rank)
    size = (rows, length)
    ids = torch.randint(0, 128, size, generator=generator)
    ids[:, :PROMPT] = ids[::GROUP, :PROMPT].repeat_interleave(GROUP, 0)[:rows]
    mask = torch.zeros(size, dtype=torch.bool)
    mask[:, PROMPT - 1 : -1] = True
    old = -torch.rand(size, generator=generator) * mask
    noise = torch.randn(size, generator=generator) * 0.02 * mask
    index = torch.arange(rows) + rank * rows
    reward = torch.randint(0, 2, (rows,), generator=generator).float()
    # the first expert at random, then the next ones: different experts as routers choose them
    first = torch.randint(0, EXPERTS, (rows, length - 1, layers, 1), generator=generator)
    routes = ((first + torch.arange(topk)) % EXPERTS).to(torch.int16)
    return RankBatch(
        dp_rank=rank,
        index=index,
        input_ids=ids,
        labels=torch.where(mask, ids.roll(-1, 1), -100),
        loss_mask=mask,
        attention_mask=torch.ones(size, dtype=torch.bool),
        advantage=torch.randn(rows, 1, generator=generator) * mask,
        old_logprobs=old,
        rollout_logprobs=old + noise,
        ref_logprobs=old.clone(),
        position_ids=torch.arange(length).repeat(rows, 1),
        turn_index=torch.where(mask, 0, -1),
        trajectory_id=index.clone(),
        reward=reward,
        reward_baseline=torch.full((rows,), 0.5),
        routes=tuple(routes),
    )


def measure(path: Path) -> dict[str, float]:
    """Wall-clock and processor seconds and peak memory of one ``analyze --json``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    load = os.getloadavg()[0]
    subprocess.run(
        [sys.executable, "-m", "replay_lib.cli", "analyze", str(path), "--json"],
        cwd=path.parent,  # no task: nothing is kept
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "load_average_before": round(load, 2),
        "peak_gib": round(after.ru_maxrss / 2**20, 3),  # KiB, of the largest child so far
    }


def keep(file: Path, row: dict[str, object]) -> None:
    """Put ``row`` among the rows of ``file``, in the place of one of the same shape."""
    names = ("rows", "length", "ranks", "layers", "topk")
    known = json.loads(file.read_text())["rows"] if file.is_file() else []
    others = [one for one in known if any(one[name] != row[name] for name in names)]
    document = {"benchmark": "analyze", "environment": environment(), "rows": [*others, row]}
    file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
