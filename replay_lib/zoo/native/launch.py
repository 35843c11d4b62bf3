"""Start a recording job with torchrun and read its answer. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from replay_lib import errors
from replay_lib.engine.machine import cuda_devices
from replay_lib.errors import EngineError, SpikeReplayError, UsageError
from replay_lib.snapshot.model import Parallel
from replay_lib.zoo.native.parallel import shown

WORKER = "replay_lib.zoo.native.worker"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class LayoutStep:
    """One step to record: an existing snapshot, a new directory, and the layout to run on."""

    source: Path
    target: Path
    parallel: Parallel


def record_steps(
    steps: Sequence[LayoutStep], *, device: str, tell: Tell = lambda _line: None
) -> list[dict[str, Any]]:
    """Run each step again on its layout, on ``device`` (cpu or cuda), one process a rank.

    Layouts of as many ranks share a job. Returns for each step its ``norm`` and ``parameters``
    (the norms of whole gradients by checkpoint key and layer). Raises what a rank met, or
    EngineError.
    """
    by_ranks: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        by_ranks.setdefault(step.parallel.world_size, []).append(number)
    have = cuda_devices()
    if device == "cuda" and have < max(by_ranks, default=0):
        raise UsageError(
            f"layouts of {max(by_ranks)} ranks need {max(by_ranks)} NVIDIA devices, {have} found"
        )
    recorded: dict[int, dict[str, Any]] = {}
    for ranks, numbers in by_ranks.items():
        answers = _job([steps[n] for n in numbers], ranks, device, tell)
        recorded.update(zip(numbers, answers, strict=True))
    return [recorded[n] for n in range(len(steps))]


def _job(steps: Sequence[LayoutStep], ranks: int, device: str, tell: Tell) -> list[dict[str, Any]]:
    request = {
        "device": device,
        "steps": [
            {
                "source": str(step.source.absolute()),
                "target": str(step.target.absolute()),
                "parallel": asdict(step.parallel),
            }
            for step in steps
        ],
    }
    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        asked, told = Path(home) / "request.json", Path(home) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        status, lines = _run(asked, told, ranks, device, tell)
        answer = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    if "error" in answer:
        raise _named(answer["error"]["code"])(answer["error"]["message"])
    if status or "recorded" not in answer:
        # torchrun closes with a long report of its own; what the ranks said stands before it
        own = next((i for i, line in enumerate(lines) if "failed (exitcode" in line), len(lines))
        last = "\n  ".join(lines[:own][-30:])
        names = ", ".join(shown(step.parallel) for step in steps)
        raise EngineError(
            f"the job that recorded on {names} ended with status {status}. "
            f"End of what it said:\n  {last}"
        )
    recorded: list[dict[str, Any]] = answer["recorded"]
    return recorded


def _run(
    asked: Path, told: Path, ranks: int, device: str, tell: Tell
) -> tuple[int | None, list[str]]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", WORKER, str(asked), str(told)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(device),
    )
    lines: list[str] = []
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line.rstrip())
                tell(lines[-1])
        except BaseException:
            _end(process)  # an interrupted caller leaves no job behind
            raise
    return process.returncode, lines


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun and its ranks, which are in process groups of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _environment(device: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ | own


def _named(code: str) -> type[SpikeReplayError]:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    found = [k for k in kinds if issubclass(k, SpikeReplayError) and k.code == code]
    return found[0] if found else EngineError
