"""Replay many snapshots in one process, one after the other: imports and groups are paid once.

The engine's own worker serves each request list; what it meets (an error too) is answered as one
JSON line. Run as a program: one JSON list of requests on stdin, one line an answer on stdout.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Ask:
    """One snapshot: its directory, experiments as written, dtype, and a fault to plant."""

    snapshot: Path
    experiments: tuple[str, ...] = ("baseline",)
    precision: str = "recorded"
    plant: str = ""


@dataclass
class Answer:
    """Outcomes by experiment as plain data, or the error's code and message."""

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: dict[str, str] | None = None

    @property
    def baseline(self) -> dict[str, Any]:
        assert self.error is None, self.error
        return self.outcomes["baseline"]

    @property
    def norm(self) -> float:
        return float(self.baseline["grad_norm_preclip"])


def replay_all(asks: Sequence[Ask], timeout_s: float = 300) -> list[Answer]:
    """Answers in the order of ``asks``, all from one child process."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    request = json.dumps([vars(a) | {"snapshot": str(a.snapshot)} for a in asks])
    ended = subprocess.run(
        [sys.executable, str(Path(__file__))],
        input=request,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=timeout_s,
    )
    lines = [line[1:] for line in ended.stdout.splitlines() if line.startswith("@")]
    assert len(lines) == len(asks), ended.stderr[-3000:]
    return [Answer(**json.loads(line)) for line in lines]


class _Channel:
    """Takes the place of the worker's line to its parent."""

    def __init__(self, requests: Sequence[dict[str, Any]]) -> None:
        self.waiting, self.sent = requests, []

    def send(self, event: str, **values: Any) -> None:
        self.sent.append({"event": event, **values})

    def requests(self, _comm: Any) -> Iterator[dict[str, Any]]:
        yield from self.waiting


def _serve(ask: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from replay_lib.engine import worker
    from replay_lib.engine.protocol import Experiment
    from replay_lib.errors import SpikeReplayError

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    experiments = [Experiment.parse(e).model_dump(mode="json") for e in ask["experiments"]]
    opening = {"op": "open", "snapshot": ask["snapshot"], "precision": ask["precision"]}
    channel = _Channel([opening, {"op": "run", "experiments": experiments}])
    try:
        worker._serve(channel, time.perf_counter())
    except SpikeReplayError as error:
        return {"error": {"code": error.code, "message": str(error)}}
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
    for event in channel.sent:
        if event["event"] == "error":
            return {"error": {"code": event["code"], "message": event["message"]}}
    found = [e["outcome"] for e in channel.sent if e["event"] == "outcome"]
    return {"outcomes": dict(zip(ask["experiments"], found, strict=True))}


def _planted(name: str) -> None:
    import mutate_values

    from replay_lib.engine import step

    if not hasattr(step, "real_forward"):
        step.real_forward = step.forward
    step.forward = (
        mutate_values.forward_first(step.real_forward)
        if name == "forward-first"
        else step.real_forward
    )


def main() -> None:
    """Answer the requests on stdin."""
    warnings.simplefilter("ignore")
    os.environ |= {"SPIKE_REPLAY_DEVICE": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    from replay_lib.engine import shims

    shims.install()
    for ask in json.loads(sys.stdin.read()):
        _planted(ask["plant"])
        answer = _serve(ask)
        sys.stdout.write("@" + json.dumps(answer) + "\n")
        sys.stdout.flush()


def is_nan(value: Any) -> bool:
    """Outcomes are read from JSON, where NaN may be null or a word."""
    return value is None or (isinstance(value, str) or math.isnan(value))


if __name__ == "__main__":
    main()
