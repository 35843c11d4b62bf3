"""Trees of outputs as a trainer leaves them: ``<root>/<prefix>~<job>__<role>/checkpoints/...``."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

SNAPSHOT = Path(__file__).parents[1] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
WHEN = "2026-11-01 10:00:00"
HOUR_AGO = time.time() - 3600  # at rest: nothing waits for it


def make_snapshot(
    root: Path, step: int, *, norm: float = 8.0, median: float = 2.0, max_snapshots: int = 3
) -> Path:
    """A whole snapshot of ``step`` in ``root``, an hour old."""
    target = root / f"iter_{step:07d}"
    shutil.copytree(SNAPSHOT, target)
    file = target / "axrl_metadata.json"
    metadata = json.loads(file.read_text())
    metadata |= {"global_step": step, "grad_norm": norm, "grad_norm_median": median}
    metadata |= {"spike_ratio_actual": norm / median}
    file.write_text(json.dumps(metadata))
    config = target / "megatron_worker_config.json"
    saved = json.loads(config.read_text())
    saved["spike_debug"]["max_snapshots"] = max_snapshots
    config.write_text(json.dumps(saved))
    for path in target.iterdir():
        os.utime(path, (HOUR_AGO, HOUR_AGO))
    return target


def make_output(
    outputs: Path, name: str, steps: Iterable[int] = (), *, max_snapshots: int = 3
) -> Path:
    """The output directory ``name`` below ``outputs`` with a snapshot of each step."""
    output = outputs / name
    root = output / "checkpoints" / "spike_snapshots"
    root.mkdir(parents=True)
    for step in steps:
        make_snapshot(root, step, max_snapshots=max_snapshots)
    return output


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and mtime_ns of every file below ``directory``: what must not change."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def warning(
    step: int, norm: str, before: str = "2026-11-01 10:00:00 - w.py:1087 - WARNING - "
) -> str:
    """The trainer's own warning of a spike, as one line of a log."""
    told = f"Gradient spike detected at step {step}, grad_norm={norm}, saving debug snapshot."
    return f"{before}{told}\n"


def root_of(source: Path) -> Path:
    return source.parent.with_name("spike_snapshots-active")


def visible(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != ".locks") if root.is_dir() else []
