"""The task file: rendered from the ledger, and nothing that somebody typed is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli_ran import Ran
from make_results import BASELINE, outcome, result

from replay_lib.errors import UsageError
from replay_lib.record import ledger
from replay_lib.record.notes import split
from replay_lib.record.task import Task
from replay_lib.record.task_file import document, render, render_stale

JOB = "axrl-v002-052915-math-moe-r3"
COPY = f"/data/0612~{JOB}__actor/checkpoints/spike_snapshots-active/iter_0000085"
SIGNALS = {
    "signs": [
        {"name": "sign_imbalance", "present": True, "found": "9 * more <b>"},
        {"name": "length_outliers", "present": False, "found": "none"},
    ]
}
FAILED = result(outcome("use-tis-loss", 9.0))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """One with an event of every kind."""
    task = Task(JOB, tmp_path)
    run = ledger.new_run()
    ledger.append(task, "preserved", snapshot="/data/iter_0000085", preserved=COPY)
    ledger.append(task, "analyzed", snapshot=COPY, signals=SIGNALS)
    command = f"spike-replay replay '{COPY}' -m use-tis-loss"
    planned = ["baseline", "use-tis-loss", "evil|<b>`"]
    ledger.append(task, "started", run=run, command=command, snapshot=COPY, planned=planned)
    ledger.append(task, "result", run=run, result=result(BASELINE).as_json())
    ledger.append(task, "result", run=run, result=FAILED.as_json())
    name, message = "tiny-step85 / evil|<b>`", "found <script>, expected | none"
    ledger.append(task, "failure", run=run, experiment=name, code="batch", message=message)
    ledger.append(task, "ended", run=run, exit_code=1, seconds=3.0)
    ledger.append(task, "observation", text="the second row is long")
    ledger.append(task, "next_step", text="try masking it")
    ledger.append(task, "recorded", method="m", card="spike-mitigation-methods/m.md", status="s")
    ledger.append(task, "reported", page="x.report.html", report="x.report.md", sha256="0")
    return task


def section(task: Task, title: str) -> str:
    text = task.file.read_text()
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0].strip()


def test_every_section_tells_what_happened(task: Task) -> None:
    assert render(task) == ()
    text = task.file.read_text()
    assert text.startswith(f"# Spike replay: {JOB}\n\n- role: actor\n- output directory: `/data/")
    assert COPY in section(task, "Active snapshots")
    assert section(task, "Replay command") == (
        f"```sh\nspike-replay replay '{COPY}' -m use-tis-loss\n```"
    )
    assert "| folded     |" in section(task, "Fidelity")
    rows = section(task, "Experiments").splitlines()[2:]
    assert [row.split(" | ")[2].strip() for row in rows] == [
        "baseline",
        "use-tis-loss",
        "evil&#124;&lt;b&gt;\\`",
    ]
    assert [row.split(" | ")[-1].strip(" |") for row in rows] == [
        "reproduced",
        "fail",
        "refused (batch)",
    ]
    found = "sign_imbalance (9 \\* more &lt;b&gt;)"
    assert section(task, "Observations").splitlines()[0].endswith(f"`{COPY}`: {found}")
    assert "the second row is long" in section(task, "Observations")
    failed = section(task, "Failed attempts").splitlines()
    assert "tiny-step85 / use-tis-loss: fail: norm 9 is 4.5" in failed[0]
    assert failed[1].endswith("batch: found &lt;script&gt;, expected &#124; none")
    assert "try masking it" in section(task, "Next steps")
    assert "m: s, `spike-mitigation-methods/m.md`" in section(task, "Methods recorded")
    assert "`x.report.html`, `x.report.md`" in section(task, "Reports")
    assert section(task, "Commands").split("\n\n")[0].endswith("exit code 1 after 3 s")
    assert "<script" not in text and "<b>" not in text


def test_the_document_is_strict_json(task: Task) -> None:
    told = json.loads(json.dumps(document(task), allow_nan=False))
    assert (told["job"], told["roles"], told["state"]) == (JOB, ["actor"], "open")
    assert told["active_snapshots"] == [COPY]
    assert [one["experiment"] for one in told["experiments"]][:2] == ["baseline", "use-tis-loss"]
    assert told["experiments"][1]["result"] == FAILED.as_json()
    ledger.append(task, "finished", text="cured")
    assert document(task)["finished"]["text"] == "cured"


def type_into(task: Task, typed: str) -> None:
    text = task.file.read_text()
    task.file.write_text(text.replace("<!-- notes -->\n", f"<!-- notes -->\n{typed}"))


def test_notes_survive(task: Task) -> None:
    render(task)
    type_into(task, "\n- mine: `x` | <b>  \n")
    before = split(task.file.read_bytes()).notes
    ledger.append(task, "observation", text="something new")
    assert render(task) == ()
    assert split(task.file.read_bytes()) == (before, False)
    assert "something new" in task.file.read_text()
    assert before is not None and b"\n- mine: `x` | <b>  \n" in before
    assert [f.name for f in task.file.parent.glob("*.md")] == [task.file.name]


def test_rendering_again_changes_nothing(task: Task) -> None:
    render(task)
    before = task.file.stat().st_ino, task.file.read_bytes()
    render(task)
    assert (task.file.stat().st_ino, task.file.read_bytes()) == before


@pytest.mark.parametrize("marker", ["<!-- notes -->\n", "<!-- end of notes -->\n"])
def test_damaged_markers_lose_nothing(task: Task, marker: str) -> None:
    render(task)
    type_into(task, "mine\n")
    damaged = task.file.read_text().replace(marker, "")
    task.file.write_text(damaged)
    (told,) = render(task)
    (beside,) = task.file.parent.glob("*.edited-*.md")
    assert beside.read_text() == damaged
    assert "the markers of its notes were damaged" in told and beside.name in told
    assert told in task.file.read_text()  # and it stays until somebody deletes it
    assert render(task) == ()


def test_an_edit_outside_the_notes_is_kept_beside(task: Task) -> None:
    render(task)
    type_into(task, "mine\n")
    edited = task.file.read_text().replace("## Next steps\n", "## Next steps\n\n- and this\n")
    task.file.write_text(edited)
    (told,) = render(task)
    (beside,) = task.file.parent.glob("*.edited-*.md")
    assert beside.read_text() == edited
    assert "more than its notes was edited" in told
    assert "mine\n" in task.file.read_text() and "- and this" not in task.file.read_text()
    assert render(task) == ()


def test_two_at_once_leave_one_whole_file(task: Task) -> None:
    render(task)
    type_into(task, "mine\n")

    def add(number: int) -> None:
        ledger.append(task, "observation", text=f"number {number}")
        render(task)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(12)))
    text = task.file.read_text()
    assert all(f"number {n}\n" in text for n in range(12))
    assert "mine\n" in text and not split(task.file.read_bytes()).touched


def test_what_a_killed_writer_left_is_removed_but_nobody_elses(task: Task) -> None:
    render(task)
    left = task.file.with_name(f".{task.file.name}.a1_b2c3d")
    others = [task.file.with_name(f".{task.job}.jsonl.lock"), task.file.with_name(".x.md.a1b2c3d4")]
    for file in (left, *others):
        file.write_text("half")
    render(task)
    assert not left.exists() and all(file.exists() for file in others)


def test_a_file_that_cannot_be_written_is_one_error(task: Task) -> None:
    task.file.mkdir()
    with pytest.raises(UsageError, match="expected a task file that can be written"):
        render(task)


def test_whatever_wrote_the_ledger_what_is_stale_is_rendered(task: Task) -> None:
    assert render_stale(task.root) == ()
    before = task.file.read_text()
    assert "the second row is long" in before
    ledger.append(task, "observation", text="by another command")
    assert render_stale(task.root) == ()
    assert "by another command" in task.file.read_text()
    other = Task("other", task.root)
    ledger.append(other, "observation", text="x")
    task.ledger.write_bytes(task.ledger.read_bytes() + b"{}\n")
    (told,) = render_stale(task.root)
    assert "expected one event of a ledger" in told
    assert other.file.exists(), "one broken ledger does not stop the others"


def test_who_may_only_read_is_shown_it_all_the_same(
    task: Task, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    render(task)
    task.file.write_bytes(
        task.file.read_bytes().replace(b"-->\n\n<!-- end", b"-->\nmine\n<!-- end")
    )
    ledger.append(task, "observation", text="a new one")
    lock = task.file.with_name(f".{task.file.name}.lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()  # nothing can be rendered
    monkeypatch.chdir(task.root)
    ran = Ran(capsys, "task", "show", task.job)
    assert ran.code == 0 and "mine" in ran.out and "a new one" in ran.out
    assert "not rendered: " in ran.err
    ran = Ran(capsys, "task", "show", task.job, "--json")
    assert ran.document["observations"][-1]["text"] == "a new one"


def test_an_interrupt_is_one_document_too(
    task: Task, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Task) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(task.root)
    monkeypatch.setattr("replay_lib.cli.task._row", interrupted)
    ran = Ran(capsys, "task", "list", "--json")
    assert (ran.code, ran.document["error"]["code"]) == (130, "interrupted")
