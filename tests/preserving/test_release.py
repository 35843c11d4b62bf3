"""``release``: every reason not to, at once; then whole or gone."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from cli_ran import Ran
from output_trees import content, make_snapshot

from replay_lib.errors import SnapshotError, UsageError
from replay_lib.porting import export_case
from replay_lib.preserving import Preserved, preserve, release
from replay_lib.record import ledger
from replay_lib.record.history import history_of
from replay_lib.record.task import Task

TASK = Task("job-a")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preserved:
    """Preserved for job-a, called where its task is kept."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "x~job-a__actor" / "checkpoints" / "spike_snapshots"
    done = preserve(make_snapshot(root, 85), task="job-a")
    ledger.append(TASK, "preserved", preserved=str(done.path))
    return done


def finish(task: Task = TASK) -> None:
    task.report.write_text("# report")
    task.page.write_text("<html>")
    told: dict[str, Any] = {"page": str(task.page), "report": str(task.report), "sha256": "0"}
    ledger.append(task, "reported", **told)
    ledger.append(task, "finished", text="done")


def make_case(directory: Path, snapshot: str, quiet: str | None = None) -> Path:
    directory.mkdir(parents=True)
    line = f"quiet: {quiet}\n" if quiet else ""
    (directory / "case.yaml").write_text(f"schema: 1\nsnapshot: {snapshot}\n{line}")
    return directory


def test_a_finished_task_lets_it_go_and_the_source_stays(kept: Preserved) -> None:
    before = content(kept.source)
    finish()
    released = release(kept.path)
    assert (released.tasks, released.files, released.before) == (
        ("job-a",),
        len(kept.manifest.files),
        False,
    )
    copied = [k.size for k in kept.manifest.files.values() if k.how == "copied"]
    assert released.freed == sum(copied) < released.bytes
    assert not kept.path.parent.exists()
    assert content(kept.source) == before
    last = ledger.read(TASK)[-1]
    assert (last.kind, last.data) == ("released", {"preserved": str(kept.path)})


def test_every_reason_is_told_at_once(kept: Preserved, tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    relative = os.path.relpath(kept.path, cases / "one")
    make_case(cases / "one", relative)
    make_case(cases / "two", "../one/elsewhere", relative)
    make_case(cases / "odd", "[")
    make_case(cases / "other", "../../somewhere/iter_0000085")
    ledger.append(Task("job-b"), "preserved", preserved=str(kept.path))
    ledger.append(TASK, "started", command="sweep")
    with pytest.raises(UsageError) as caught:
        release(kept.path, cases=[cases])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{kept.path}: it is not released, for 8 reasons:"
    told = "\n".join(lines[1:])
    for reason in (
        "the task job-a is not finished",
        "the report of task job-a is not written",
        f"a command of task job-a is at work (process {os.getpid()})",
        "the task job-b is not finished",
        "the report of task job-b is not written",
        f"the case {cases / 'one'} refers to it (snapshot). Export it",
        f"the case {cases / 'two'} refers to it (quiet)",
        f"the case {cases / 'odd'} cannot be read, and may refer to it",
    ):
        assert reason in told
    assert kept.path.is_dir()


@pytest.mark.parametrize("kind", ["preserved", "result", "failure", "recorded"])
def test_work_that_came_after_the_last_report_is_new_work(kept: Preserved, kind: str) -> None:
    finish()
    ledger.append(TASK, kind, preserved=str(kept.path))
    with pytest.raises(UsageError, match="the report of task job-a is older than the last that"):
        release(kept.path)
    ledger.append(TASK, "finished", text="done")
    with pytest.raises(UsageError, match="for 1 reason:"):
        release(kept.path)
    finish()
    TASK.report.unlink()
    with pytest.raises(UsageError, match="the report of task job-a is gone"):
        release(kept.path)


def test_what_somebody_put_there_is_not_deleted(kept: Preserved) -> None:
    finish()
    (kept.path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"it holds what was not preserved, .*: notes\.txt$"):
        release(kept.path)
    assert (kept.path / "notes.txt").read_text() == "mine"
    (kept.path / "notes.txt").unlink()
    release(kept.path)
    assert not kept.path.exists()


def test_a_case_refers_by_path_and_no_longer_once_it_was_exported(
    kept: Preserved, tmp_path: Path
) -> None:
    finish()
    cases = tmp_path / "cases"
    (tmp_path / "link").symlink_to(kept.path)
    case = make_case(cases / "spike", "../../link")
    with pytest.raises(UsageError, match="refers to it"):
        release(kept.path, cases=[cases])
    export_case(case, tmp_path / "store" / "spike")
    shutil.rmtree(case)
    (tmp_path / "store" / "spike").rename(case)
    linked = make_case(cases / "linked", "snapshot/iter_0000085")
    shutil.copytree(kept.path, linked / "snapshot/iter_0000085", copy_function=os.link)
    release(kept.path, cases=[cases])
    assert not kept.path.exists()


def test_without_a_task_one_has_to_be_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    kept = preserve(make_snapshot(tmp_path / "spike_snapshots", 85))
    with pytest.raises(UsageError, match="no task is known that it belongs to: name it with"):
        release(kept.path)
    ledger.append(Task("job-b"), "observation", text="x")
    finish(Task("job-b"))
    assert release(kept.path, task="job-b").tasks == ("job-b",)


def test_nothing_else_is_deleted(kept: Preserved, tmp_path: Path) -> None:
    finish()
    copy = tmp_path / "other-active" / "iter_0000085"
    shutil.copytree(kept.path, copy)
    link = kept.path.with_name("iter_0000086")
    link.symlink_to(kept.path)
    for path, found in (
        (kept.source, "preserve did not make"),
        (copy, "made by other means"),
        (link, "preserve did not make"),
    ):
        with pytest.raises(SnapshotError, match=found):
            release(path)
        assert path.exists()
    with pytest.raises(UsageError, match="no such directory"):
        release(tmp_path / "absent")


def test_a_kill_before_the_ledger_is_made_good_by_the_next(
    kept: Preserved, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("replay_lib.preserving.releasing._tell_ledgers", killed)
        with pytest.raises(KeyboardInterrupt):
            release(kept.path)
    assert not kept.path.exists()
    assert release(kept.path).before
    assert ledger.read(TASK)[-1].kind == "released"
    with pytest.raises(UsageError, match="no such directory"):
        release(kept.path)


def test_one_that_cannot_be_renamed_stays(kept: Preserved, monkeypatch: pytest.MonkeyPatch) -> None:
    finish()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UsageError, match="cannot be deleted \\(Permission denied\\)"):
        release(kept.path)
    assert kept.path.is_dir()
    assert ledger.read(TASK)[-1].kind == "finished"


def test_the_command(kept: Preserved, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused = Ran(capsys, "release", kept.path, "--json")
    assert refused.code == 2
    assert "is not finished" in refused.document["error"]["message"]
    finish()
    make_case(tmp_path / "spike_cases" / "one", os.path.relpath(kept.path, "spike_cases/one"))
    assert "refers to it" in Ran(capsys, "release", kept.path).err
    shutil.rmtree(tmp_path / "spike_cases")
    ran = Ran(capsys, "release", kept.path, "--json")
    assert (ran.code, ran.document["released"]) == (0, str(kept.path))


def test_another_spelling_of_its_path_is_the_same_snapshot(kept: Preserved, tmp_path: Path) -> None:
    finish()
    ledger.append(TASK, "preserved", preserved=str(kept.path))  # after the report
    ledger.append(TASK, "finished", text="done")
    (tmp_path / "alias").symlink_to(tmp_path / "x~job-a__actor")
    below = kept.path.relative_to(tmp_path / "x~job-a__actor")
    for spelled in (
        tmp_path / "alias" / below,
        tmp_path / "x~job-a__actor" / ".." / "alias" / below,
    ):
        with pytest.raises(UsageError, match="the report of task job-a is older than"):
            release(spelled)
    finish()
    release(tmp_path / "alias" / below)
    assert ledger.read(TASK)[-1].data == {"preserved": str(kept.path)}
    assert history_of(ledger.read(TASK)).active == ()


def test_a_trainers_directory_is_not_even_cleared(kept: Preserved) -> None:
    left = kept.source.parent / f".iter_0000099.{socket.gethostname()}-abcdefgh.part"
    left.mkdir()
    with pytest.raises(SnapshotError, match="preserve did not make"):
        release(kept.source)
    assert left.is_dir()


def test_a_case_at_any_depth_refers_to_it(kept: Preserved, tmp_path: Path) -> None:
    finish()
    deep = tmp_path / "cases" / "family" / "one"
    make_case(deep, os.path.relpath(kept.path, deep))
    (tmp_path / "cases" / "family" / "loop").symlink_to(tmp_path / "cases")
    with pytest.raises(UsageError, match="family/one refers to it"):
        release(kept.path, cases=[tmp_path / "cases"])


@pytest.mark.parametrize("how", ["links to its files", "a checkpoint that a method is given"])
def test_a_case_may_refer_in_other_ways(kept: Preserved, tmp_path: Path, how: str) -> None:
    finish()
    own = tmp_path / "cases" / "one" / "own" / kept.path.name
    make_case(own.parents[1], f"own/{kept.path.name}")
    if how == "links to its files":
        own.mkdir(parents=True)
        (own / "axrl_metadata.json").symlink_to(kept.path / "axrl_metadata.json")
    else:
        given = os.path.relpath(kept.path, own.parents[1])
        line = f'expected:\n  "use-initial-model:checkpoint={given}": pass\n'
        with (own.parents[1] / "case.yaml").open("a") as file:
            file.write(line)
    with pytest.raises(UsageError, match="cases/one refers to it"):
        release(kept.path, cases=[tmp_path / "cases"])
