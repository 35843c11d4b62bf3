"""``docs/workflow.sh``: from a job's name to a released snapshot, a report and a method's card."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from skill_steps import JOB, ROOT, outputs_with

from replay_lib.record import ledger
from replay_lib.record.cards import read_cards
from replay_lib.record.task import Task

ZOO = ROOT / "spike_cases" / "zoo-natural" / "snapshot" / "iter_0000061"
METHOD = "clip-rollout-log-ratio"


@pytest.mark.slow
def test_from_a_jobs_name_to_a_card(tmp_path: Path) -> None:
    output = outputs_with(tmp_path, ZOO)
    checkpoints = output / "checkpoints"
    before = _content(checkpoints / "spike_snapshots")
    work, programs = tmp_path / "work", tmp_path / "programs"
    work.mkdir()
    programs.mkdir()
    entry = programs / "spike-replay"
    entry.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m replay_lib.cli "$@"\n')
    entry.chmod(0o755)
    env = dict(os.environ) | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "JOB": JOB,
        "OUTPUTS": str(output.parent),
        "METHOD": METHOD,
        "RATIONALE": "a row's ratios are outliers",
    }
    ran = subprocess.run(
        ["bash", str(ROOT / "docs" / "workflow.sh")],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]

    task = Task(JOB, work)
    kinds = list(dict.fromkeys(event.kind for event in ledger.read(task)))
    wanted = ["found", "preserved", "started", "result", "ended", "analyzed", "observation"]
    assert [kind for kind in kinds if kind in wanted] == wanted
    assert {"recorded", "finished", "reported", "released"} <= set(kinds)
    results = [e.data["result"] for e in ledger.read(task) if e.kind == "result"]
    verdicts = {result["experiment"]: result["verdict"] for result in results}
    assert (verdicts["baseline"], verdicts[METHOD]) == ("reproduced", "pass")
    assert task.page.is_file() and task.report.is_file() and task.file.is_file()
    assert METHOD in task.report.read_text()
    card = read_cards(work / "spike-mitigation-methods")[METHOD]
    assert JOB in card.text.replace("\\", "")
    # the copy is gone, and what the trainer wrote is as it was
    assert not list((checkpoints / "spike_snapshots-active").glob("iter_*"))
    assert _content(checkpoints / "spike_snapshots") == before


def _content(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*.*")}
