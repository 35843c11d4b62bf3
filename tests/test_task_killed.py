"""Whatever happens to a command, its task keeps what was there and what was told."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from cli_ran import Ran

from replay_lib import run
from replay_lib.record import ledger
from replay_lib.record.notes import split
from replay_lib.record.task import Task
from replay_lib.record.task_file import render

TESTS = Path(__file__).parent
SNAPSHOT = TESTS.parent / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
METHODS = ("balance-negative-advantages", "clip-advantages", "disable-routing-replay")
KILLS = 50
TOLD = re.compile(r"\] iter_0000085 \d+/\d+ (\S+): [a-z_]+$")  # of a result, on stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_fifty_killed_sweeps_lose_nothing_that_was_told(tmp_path: Path) -> None:
    task = Task("job", tmp_path)
    ledger.append(task, "observation", text="before")
    render(task)
    text = task.file.read_text()
    task.file.write_text(text.replace("<!-- notes -->\n", "<!-- notes -->\nmine\n"))
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        [sys.executable, str(TESTS / "killed_sweeps.py"), str(tmp_path), str(SNAPSHOT), str(KILLS)],
        env=os.environ | {"PYTHONPATH": path, "FAKE_ENGINE_LOG": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("killed")]
    assert len(pids) == KILLS
    for line in task.ledger.read_bytes().splitlines(keepends=True):
        assert line.endswith(b"\n") and json.loads(line)
    kept: dict[int, set[str]] = {}
    for event in ledger.read(task):
        if event.kind == "result":
            kept.setdefault(event.pid, set()).add(event.data["result"]["experiment"])
    seen = 0
    for pid in pids:
        file = tmp_path / f"{pid}.err"
        lines = file.read_text().splitlines() if file.exists() else []
        told = {found.group(1) for line in lines if (found := TOLD.search(line))}
        assert told <= kept.get(pid, set())
        seen += len(told)
    assert seen > KILLS / 2, "most kills fell before the first result"
    # the file as one of the commands wrote it, whole
    assert split(task.file.read_bytes()) == (b"mine\n\n", False)
    assert list(task.file.parent.glob("*.edited-*")) == []
    assert render(task) == ()
    assert "killed or still running" in task.file.read_text()
    assert [f.name for f in task.file.parent.glob(".job.md.*")] == [".job.md.lock"]


def test_two_commands_at_once_on_one_task(tmp_path: Path) -> None:
    code = (
        "import fake_engine, sys; fake_engine.install(); from replay_lib.cli import main;"
        f"main(['sweep', {str(SNAPSHOT)!r}, *{METHODS}, '--task', 'job'])"
    )
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = os.environ | {"PYTHONPATH": path, "FAKE_ENGINE_LOG": ""}
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env, stderr=-3, stdout=-3)
        for _ in range(2)
    ]
    assert [one.wait() for one in both] == [1, 1]
    task = Task("job", tmp_path)
    events = ledger.read(task)
    runs = {event.run for event in events}
    assert len(runs) == 2
    for name in runs:
        kinds = [event.kind for event in events if event.run == name]
        assert kinds == ["started", *["result"] * 4, "ended"]
    outputs = {event.data["output"] for event in events if event.kind == "started"}
    assert len(outputs) == 2
    text = task.file.read_text()
    assert text.count("exit code 1") == 2 and not split(text.encode()).touched


@pytest.mark.parametrize(
    "ending", [(KeyboardInterrupt, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_an_end_from_outside_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, ending: Any
) -> None:
    ends, code, status = ending

    class Ended(fake_engine.FakeEngine):
        def run_many(self, experiments: Any) -> Any:
            for outcome in super().run_many(experiments):
                yield outcome
                if outcome.experiment.name == METHODS[0]:
                    if ends is KeyboardInterrupt:
                        raise KeyboardInterrupt
                    os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "open_engine", Ended)
    monkeypatch.setenv(fake_engine.LOG, "")
    ran = Ran(capsys, "sweep", SNAPSHOT, *METHODS, "--task", "job")
    assert ran.code == status
    events = ledger.read(Task("job"))
    assert [event.kind for event in events][-2:] == ["failure", "ended"]
    assert (events[-2].data["code"], events[-1].data["exit_code"]) == (code, status)
    text = Task("job").file.read_text()
    assert f"failed ({code})" in text and METHODS[0] in text


@pytest.fixture(params=["a small file system", "a write that is refused"])
def filling(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Where to work, and what makes its disk full."""
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "a small file system":
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no file system can be mounted here")

        def fill() -> None:
            with (place / "ballast").open("wb", buffering=0) as ballast:
                try:
                    while True:
                        ballast.write(b"x" * 512)
                except OSError as error:
                    assert error.errno == errno.ENOSPC

        yield place, fill
        os.chdir("/")
        subprocess.run(["umount", "-l", str(place)], check=True)
        return
    real = os.write

    def fill_by_refusal() -> None:
        def write(file: int, content: Any) -> int:
            if len(content) < 300:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, content[:200])  # as on a disk with a little left

        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(ledger.os, "write", write)
        monkeypatch.setattr("tempfile.mkstemp", refused)

    yield place, fill_by_refusal


def test_a_full_disk_is_one_error_and_loses_nothing(
    filling: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    place, fill = filling
    monkeypatch.chdir(place)
    monkeypatch.setenv(fake_engine.LOG, "")
    task = Task("job")
    ledger.append(task, "observation", text="before")
    render(task)
    before = task.ledger.read_bytes()

    class Filling(fake_engine.FakeEngine):
        def run_many(self, experiments: Any) -> Any:
            for outcome in super().run_many(experiments):
                if outcome.experiment.name == METHODS[1]:
                    fill()
                yield outcome

    monkeypatch.setattr(run, "open_engine", Filling)
    ran = Ran(capsys, "replay", SNAPSHOT, *(w for m in METHODS for w in ("-m", m)), "--task", "job")
    assert ran.code == 2
    assert all(method in ran.out for method in METHODS), "results are shown all the same"
    errors = [line for line in ran.err.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "No space left on device" in errors[0]
    content = task.ledger.read_bytes()
    assert content.startswith(before) and content.endswith(b"\n")
    kept = [e.data["result"]["experiment"] for e in ledger.read(task) if e.kind == "result"]
    assert kept[:2] == ["baseline", METHODS[0]]
    assert not split(task.file.read_bytes()).touched
    assert "before" in task.file.read_text()
