"""Both files are replaced whole, the ledger says so, and mistakes are told."""

from __future__ import annotations

import hashlib
import os

import pytest

from replay_lib.errors import UsageError
from replay_lib.record import ledger
from replay_lib.record.task import Task
from replay_lib.report.writing import write_report
from tests.cli_ran import Ran
from tests.report.make_task import COPY, JOB, full_task


def small_task(root) -> Task:
    task = Task(JOB, root)
    ledger.append(task, "observation", text="begun")
    return task


def test_the_ledger_tells_of_both_files(tmp_path):
    task = small_task(tmp_path)
    written = write_report(task)
    event = ledger.read(task)[-1]
    assert event.kind == "reported"
    assert event.data == {
        "page": str(task.page),
        "report": str(task.report),
        "sha256": hashlib.sha256(task.page.read_bytes()).hexdigest(),
    }
    assert written.sha256 == event.data["sha256"]
    page = task.page.read_bytes()
    write_report(task)
    assert task.page.read_bytes() == page


def test_a_killed_writer_leaves_the_old_page(tmp_path, monkeypatch):
    task = small_task(tmp_path)
    write_report(task)
    before = {f.name: f.read_bytes() for f in task.page.parent.iterdir()}
    ledger.append(task, "observation", text="more")
    grown = {**before, task.ledger.name: task.ledger.read_bytes()}

    def dies(_handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        write_report(task)
    assert {f.name: f.read_bytes() for f in task.page.parent.iterdir()} == grown


def test_a_task_without_a_ledger_names_those_that_have_one(tmp_path):
    small_task(tmp_path)
    with pytest.raises(UsageError) as caught:
        write_report(Task("other", tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/agent-task/spike-replay/other.jsonl: found no event, expected a task that "
        f"something was done for. Tasks here: {JOB}"
    )
    assert list((tmp_path / "agent-task" / "spike-replay").glob("other*")) == []


def test_the_command_tells_where_it_wrote_and_what_is_not_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    full_task(tmp_path)
    told = Ran(capsys, "report", JOB, "--json").document
    assert told["page"] == f"agent-task/spike-replay/{JOB}.report.html"
    assert all(one["drawn"] for one in told["plots"])
    ledger.append(Task("empty", tmp_path), "observation", text="begun")
    ran = Ran(capsys, "report", "empty")
    assert ran.code == 0
    assert "not drawn: Advantage balance. The batch was not analyzed." in ran.out
    assert "  spike-replay analyze SNAPSHOT --task empty" in ran.out
    assert Ran(capsys, "report", "nobody").code == 2


def test_a_path_in_a_command_ends_neither_line_nor_block(tmp_path, monkeypatch, capsys):
    task = Task(JOB, tmp_path)
    odd = COPY.replace("/data/", "/data\n\n# head\x1b[31m <img src=x>/")
    command = f"spike-replay sweep {odd}"
    ledger.append(task, "preserved", snapshot=odd, preserved=odd)
    ledger.append(task, "started", command=command, snapshot=odd, planned=[], output="out")
    lines = write_report(task).text.read_text(encoding="utf-8").split("\n")
    assert not [line for line in lines if line.startswith("# head") or "\x1b" in line]
    monkeypatch.chdir(tmp_path)
    shown = Ran(capsys, "report", JOB).out
    assert "\x1b" not in shown and "\n# head" not in shown
