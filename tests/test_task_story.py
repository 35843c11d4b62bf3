"""A job worked on with the command line: what its task keeps and tells. No model: norms by name."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import torch
from cli_ran import Ran

from replay_lib import run
from replay_lib.errors import EngineError
from replay_lib.guard import guarding
from replay_lib.record import ledger
from replay_lib.record.results_file import read_results
from replay_lib.record.task import Task
from replay_lib.sweep import sweeping

JOB = "axrl-v002-052915-math-moe-r3"
CASE = Path(__file__).parents[1] / "spike_cases" / "axrl-plain-step85"
HELPS, FAILS = "balance-negative-advantages", "disable-routing-replay"


class WithGradients(fake_engine.FakeEngine):
    """Gradients of one number."""

    def save_gradients(self, experiment: Any, path: Path) -> None:
        torch.save({"w": torch.tensor([fake_engine.outcome(experiment).grad_norm_preclip])}, path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model: norms by name."""
    monkeypatch.setattr(run, "open_engine", WithGradients)
    monkeypatch.setattr(guarding, "open_engine", WithGradients)
    monkeypatch.setattr(sweeping, "versions", lambda: {"torch": "none"})
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "engine.log"))


@pytest.fixture
def spike_replay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The command, called in an empty directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *arguments: Ran(capsys, *arguments)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot where a trainer leaves it."""
    place = tmp_path / f"0612~{JOB}__actor" / "checkpoints" / "spike_snapshots" / "iter_0000085"
    shutil.copytree(CASE / "snapshot" / "iter_0000085", place)
    return place


def kinds(job: str = JOB) -> list[str]:
    return [event.kind for event in ledger.read(Task(job))]


def experiments(job: str = JOB) -> list[str]:
    events = [event for event in ledger.read(Task(job)) if event.kind == "result"]
    return [event.data["result"]["experiment"] for event in events]


def output_of(ran: Ran) -> Path:
    """The directory that a command names at its end."""
    last = ran.err.splitlines()[-1]
    assert last.startswith(f"kept in agent-task/spike-replay/{JOB}.md; output: tmp/spike-replay/")
    return Path(last.split("output: ")[1])


@pytest.mark.usefixtures("fake")
def test_a_job_from_its_first_replay_to_its_end(spike_replay: Any, snapshot: Path) -> None:
    ran = spike_replay("replay", snapshot, "-m", FAILS)
    assert ran.code == 1
    assert kinds() == ["started", "result", "result", "ended"]
    started, *_, ended = ledger.read(Task(JOB))
    assert started.data["command"] == shlex.join(
        ["spike-replay", "replay", f"{snapshot}", "-m", FAILS]
    )
    assert started.data["planned"] == ["baseline", FAILS]
    assert started.data["snapshot"] == str(snapshot)
    assert ended.data["exit_code"] == 1
    output = output_of(ran)
    assert (output / "printed.txt").read_text() == ran.out
    assert [r.experiment for r in read_results(output / "results.jsonl")] == ["baseline", FAILS]

    assert spike_replay("task", "note", JOB, "one row is | long").code == 0
    assert spike_replay("task", "next", JOB, "mask it").code == 0
    assert spike_replay("sweep", snapshot, HELPS, FAILS).code == 1
    shown = spike_replay("task", "show", JOB)
    assert shown.out.rstrip("\n") == Path(f"agent-task/spike-replay/{JOB}.md").read_text().rstrip(
        "\n"
    )
    for told in (HELPS, "one row is &#124; long", "mask it", "- role: actor", f"-m {FAILS}"):
        assert told in shown.out

    (row,) = spike_replay("task", "list", "--json").document["tasks"]
    assert (row["job"], row["state"], row["experiments"]) == (JOB, "open", 5)
    assert spike_replay("task", "finish", JOB, "masked").code == 0
    document = spike_replay("task", "show", JOB, "--json").document
    assert (document["state"], document["finished"]["text"]) == ("finished", "masked")
    assert document["roles"] == ["actor"]
    assert document["replay_command"].startswith("spike-replay replay ")


@pytest.mark.usefixtures("fake")
def test_failures_and_crashes_are_kept(
    spike_replay: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "refuse.log"))
    ran = spike_replay("replay", CASE, "-m", fake_engine.REFUSED, "-m", HELPS, "--task", JOB)
    assert ran.code == 4
    assert kinds() == ["started", "result", "failure", "result", "ended"]
    failure = ledger.read(Task(JOB))[2].data
    assert failure["experiment"] == f"{CASE.name} / {fake_engine.REFUSED}"
    assert (failure["code"], failure["message"][:5]) == ("batch", "batch")

    def die(*_: object, **__: object) -> None:
        raise EngineError("the worker died")

    monkeypatch.setattr(fake_engine, "outcome", die)
    ran = spike_replay("replay", CASE, "-m", HELPS, "--task", JOB, "--json")
    assert (ran.code, ran.document["error"]["code"]) == (6, "engine")
    assert kinds()[5:] == ["started", "failure", "ended"]
    assert (output_of(ran) / "error.txt").read_text() == "error (engine): the worker died\n"
    ran = spike_replay("replay", CASE, "-m", "no-such-method", "--task", JOB)
    assert ran.code == 5
    text = Path(f"agent-task/spike-replay/{JOB}.md").read_text()
    for told in (
        "refused (batch)",
        "replay: 2 of 2 not reached",
        "failed (engine)",
        "no-such-method",
    ):
        assert told in text


@pytest.mark.usefixtures("fake")
def test_a_search_keeps_pairs_and_what_an_earlier_one_had(
    spike_replay: Any, tmp_path: Path
) -> None:
    file = tmp_path / "search.jsonl"
    search = ("sweep", CASE, HELPS, "clip-advantages", "--combine", "2", "--results", file)
    assert spike_replay(*search).err.count("ledger") == 0
    ran = spike_replay(*search, "--task", JOB)
    pair = f"clip-advantages+{HELPS}"
    every = {"baseline", HELPS, "clip-advantages"}
    assert every <= set(experiments())
    assert len(experiments()) == len(set(experiments())), "the baseline's repeats are one result"
    assert {name for name in experiments() if "+" in name} <= {pair, f"{HELPS}+clip-advantages"}
    assert ran.err.splitlines()[-1].startswith("kept in ")
    before = len(experiments())
    spike_replay(*search, "--task", JOB)
    assert experiments()[before:] == [], "nothing was replayed, and all was there"
    assert kinds()[-2:] == ["started", "ended"]


@pytest.mark.usefixtures("fake")
def test_pin_and_guard_keep_what_they_replay(
    spike_replay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "guard"))
    assert spike_replay("pin", CASE, FAILS, "--dry-run", "--task", JOB).code == 0
    assert experiments() == ["baseline", FAILS]
    given = ("--trainer", "mine:sound", "--against", "grpo", "-m", FAILS, "--task", JOB)
    ran = spike_replay("guard", CASE, *given)
    assert ran.code == 0
    events = [event for event in ledger.read(Task(JOB)) if event.kind == "result"][2:]
    assert [(e.data["under"], e.data["result"]["experiment"]) for e in events] == [
        ("grpo", "baseline"),
        ("grpo", FAILS),
        ("mine:sound", "baseline"),
        ("mine:sound", FAILS),
    ]
    assert (output_of(ran) / "printed.txt").read_text() == ran.out


@pytest.mark.usefixtures("fake")
def test_only_a_snapshot_that_names_no_job_is_told_of(spike_replay: Any, tmp_path: Path) -> None:
    bare = spike_replay("replay", CASE / "snapshot" / "iter_0000085", "--json")
    assert bare.err.splitlines()[-1] == (
        f"not kept in a ledger: {CASE}/snapshot/iter_0000085 names no job; "
        "name a task with --task JOB"
    )
    assert bare.document["exit_code"] == 0
    assert "ledger" not in spike_replay("replay", CASE).err
    assert list(Path().iterdir()) == []


@pytest.mark.usefixtures("fake")
def test_json_alone_is_on_stdout(spike_replay: Any) -> None:
    ran = spike_replay("replay", CASE, "--task", JOB, "--json")
    assert [r["experiment"] for r in ran.document["results"]] == ["baseline"]
    assert json.loads((output_of(ran) / "printed.txt").read_text()) == ran.document


def test_a_task_that_is_not_there_is_named(spike_replay: Any) -> None:
    ran = spike_replay("task", "note", JOB, "text")
    assert ran.code == 2
    assert "found no such task" in ran.err and "one begins with the first command" in ran.err
    ledger.append(Task(JOB), "observation", text="x")
    assert f"did you mean {JOB}?" in spike_replay("task", "show", f"{JOB}4").err
    assert spike_replay("task", "note", JOB, " ").code == 2
    assert spike_replay("replay", CASE, "--task", "a/b").code == 2


@pytest.mark.parametrize("words", [("note", "seen"), ("next", "to do"), ("finish",)])
def test_nothing_is_added_to_a_ledger_that_cannot_be_read(
    words: tuple[str, ...], spike_replay: Any
) -> None:
    ledger.append(Task(JOB), "observation", text="x")
    file = Task(JOB).ledger
    file.write_bytes(before := file.read_bytes() + b'{"schema": 9}\n')
    ran = spike_replay("task", words[0], JOB, *words[1:])
    assert ran.code == 2 and f"{file}: line 2:" in ran.err
    assert file.read_bytes() == before
