"""The skill for a GPU node, followed against a real ssh server on the loopback address."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_ran import Ran
from loopback import Loopback
from skill_steps import JOB, ROOT, follow, outputs_with, skill

from replay_lib.record import ledger
from replay_lib.record.task import Task

EMBEDDED = ROOT / "spike_cases" / "axrl-plain-step85" / "snapshot" / "iter_0000085"


@pytest.mark.slow
def test_every_command_of_the_skill(
    node: Loopback,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = outputs_with(tmp_path, EMBEDDED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOB", JOB)
    monkeypatch.setenv("GPU", node.ssh)
    snapshot = found / "checkpoints" / "spike_snapshots" / EMBEDDED.name
    monkeypatch.setenv("SNAPSHOT", str(snapshot))
    done = follow(skill("axrl-run-gpu-task"), lambda *words: Ran(capsys, *words), node.options[1:])
    assert done == ["replay", "sweep"]
    results = [e.data["result"] for e in ledger.read(Task(JOB)) if e.kind == "result"]
    assert len(results) > 40
    assert {result["fidelity"] for result in results} == {"folded"}
    assert list(tmp_path.glob(f"tmp/spike-replay/{JOB}/*/node.log"))
