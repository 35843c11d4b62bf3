"""A task's ledger as commands would have written it; its results are those of real replays."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from replay_lib.record import ledger
from replay_lib.record.result import Result
from replay_lib.record.results_file import read_results
from replay_lib.record.task import Task
from replay_lib.report.facts import Facts, facts_of
from tests.report.make_signals import make_signals

JOB = "axrl-v002-052915-math-moe-r3"
OUTPUT = f"/data/me/outputs/20260529~{JOB}__actor"
SNAPSHOT = f"{OUTPUT}/checkpoints/spike_snapshots/iter_0000085"
COPY = f"{OUTPUT}/checkpoints/spike_snapshots-active/iter_0000085"
#: Those of the whole task below.
PLOTS = ["history", "attempts", "where", "change", "ratio0", "balance"]
#: Text that a browser, Markdown or matplotlib would take for more than text.
HOSTILE = '<script>alert(1)</script> $x_1$ & <img src=x onerror="alert(2)"> `a` | [b](c) **d**'


def facts(task: Task) -> Facts:
    """Read back from the ledger."""
    return facts_of(task.job, task.ledger, ledger.read(task))


@cache
def real_results() -> tuple[Result, ...]:
    """Seven of axrl-plain-step85, then five of zoo-natural; each begins with its baseline."""
    return tuple(read_results(Path(__file__).parents[1] / "data" / "report" / "results.jsonl"))


def results_of(case: str) -> list[Result]:
    return [r for r in real_results() if r.case == case]


def keep_run(task: Task, run: str, results: list[Result], *, end: bool = True, **data: Any) -> None:
    """One command's events."""
    given: dict[str, Any] = {
        "command": f"spike-replay sweep {COPY}",
        "snapshot": COPY,
        "planned": [r.experiment for r in results],
        "output": f"tmp/spike-replay/{JOB}/20300102-030405",
    }
    # a process of this host that wrote no end would still be running: it is this one
    host = socket.gethostname() if end else "node-that-is-gone"
    with mock.patch("socket.gethostname", return_value=host):
        ledger.append(task, "started", run=run, **(given | data))
        for one in results:
            ledger.append(task, "result", run=run, result=one.as_json())
        if end:
            ledger.append(task, "ended", run=run, exit_code=1, seconds=12.0)


def seen(step: int, norm: float) -> dict[str, Any]:
    return {
        "path": SNAPSHOT.replace("0000085", f"{step:07d}"),
        "step": step,
        "grad_norm_preclip": norm,
        "grad_norm_median": 2.05,
    }


def full_task(root: Path) -> Task:
    """Found, preserved, analyzed, replayed twice, with failures, a killed command and notes."""
    task = Task(JOB, root)
    found = [seen(41, 1.9), seen(63, 5.7), seen(85, 8.44)]
    logged = [{"step": 70, "norm": "4.75", "fate": "rotated away"}, {"step": 71, "norm": "nan"}]
    ledger.append(
        task,
        "found",
        target=JOB,
        output_directories=[OUTPUT],
        snapshots=found,
        spikes_in_logs=logged,
    )
    how = {"files": 15, "bytes": 10**9, "how": "hardlinks"}
    ledger.append(task, "preserved", snapshot=SNAPSHOT, preserved=COPY, **how)
    signals = make_signals().model_dump(mode="json", by_alias=True)
    ledger.append(task, "analyzed", snapshot=COPY, signals=signals)
    other = OUTPUT + "/checkpoints/spike_snapshots/iter_0000061"
    keep_run(task, "a" * 12, results_of("zoo-natural"), snapshot=other)
    failure = {"experiment": "axrl-plain-step85 / needs-teacher", "code": "batch"}
    told = "the batch has no column teacher_logprobs"
    ledger.append(task, "failure", run="b" * 12, message=told, **failure)
    keep_run(task, "b" * 12, results_of("axrl-plain-step85"))
    baseline = results_of("axrl-plain-step85")[:1]
    planned = ["baseline", "user:lost-one"]
    keep_run(task, "c" * 12, baseline, end=False, planned=planned)
    ledger.append(task, "observation", text=HOSTILE)
    ledger.append(task, "next_step", text="Replay step 63 too.")
    card = "spike-mitigation-methods/clip-rollout-log-ratio.md"
    ledger.append(task, "recorded", method="clip-rollout-log-ratio", card=card, status="proven")
    return task
