"""The skills: their front matter, and every command that they name, run in their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import yaml
from cli_ran import Ran
from skill_steps import JOB, ROOT, SKILLS, follow, outputs_with, skill

from replay_lib import run
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.method_cards import writing

EMBEDDED = ROOT / "spike_cases" / "axrl-plain-step85" / "snapshot" / "iter_0000085"
MOST_LINES = 140
NAMES = sorted(path.parent.name for path in SKILLS.glob("*/SKILL.md"))
STEPS = ["find", "preserve", "task", "replay", "analyze", "sweep", "report", "record-method"]


class Comparing(fake_engine.FakeEngine):
    """A fake one that takes cosines between methods too."""

    def run_beside(self, experiment: Experiment, others: Sequence[Experiment]) -> Iterator[Outcome]:
        """Every other method goes another way."""
        for other in others:
            cosine = 1.0 if other == experiment else 0.5
            yield fake_engine.outcome(other).model_copy(update={"cosine": cosine})


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return lambda *arguments: Ran(capsys, *arguments)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, beside a tree of outputs; no model."""
    found = outputs_with(tmp_path, EMBEDDED)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for room in (run, writing):
        monkeypatch.setattr(room, "open_engine", Comparing)
    given = {
        "JOB": JOB,
        "OUTPUTS": found.parent,
        "SPIKE_REPLAY_OUTPUTS": found.parent,
        "FOUND": found,
        "LOG": found / "train.log",
        "SNAPSHOT": found / "checkpoints" / "spike_snapshots" / EMBEDDED.name,
        "METHOD": "enable-token-mismatch-tis-max2",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "work"


def test_the_three_skills_are_there() -> None:
    assert NAMES == [
        "axrl-copy-log-to-tmp-and-analyze",
        "axrl-run-gpu-task",
        "axrl-spike-replay",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_front_matter(name: str) -> None:
    opening, front, body = skill(name).split("---\n", 2)
    told = yaml.safe_load(front)
    assert opening == ""
    assert set(told) == {"name", "description"}
    assert told["name"] == name
    assert 40 < len(told["description"]) < 1024
    assert len(body.splitlines()) < MOST_LINES
    for other in re.findall(r"skill `([^`]+)`", body):
        assert other in NAMES


def test_finding_a_job_and_reading_its_log(workplace: Path, ran: Any) -> None:
    done = follow(skill("axrl-copy-log-to-tmp-and-analyze"), ran)
    assert done == ["find", "find", "task"]
    (ledger,) = workplace.glob("agent-task/spike-replay/*.jsonl")
    assert "step 85, still on disk" in ledger.read_text()


@pytest.mark.slow
def test_the_whole_way(workplace: Path, ran: Any) -> None:
    done = follow(skill("axrl-spike-replay"), ran)
    assert [step for step in dict.fromkeys(done) if step in STEPS] == STEPS
    assert done[-1] == "release"
    assert not list(workplace.parent.glob("outputs/*/checkpoints/spike_snapshots-active/iter_*"))
    assert list(workplace.parent.glob("outputs/*/checkpoints/spike_snapshots/iter_*"))
