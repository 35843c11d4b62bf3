"""The command line and paths: what is refused before a worker starts, and text shown as it is."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import fake_engine
import pytest

from replay_lib import run
from replay_lib.cli import main, replays
from replay_lib.cli.output import key_value_table, print_error, progress, stdout
from replay_lib.errors import UsageError
from replay_lib.exit_codes import ExitCode
from replay_lib.run import Step

SNAPSHOT = (
    Path(__file__).parents[1] / "spike_cases" / "axrl-plain-step85" / "snapshot" / "iter_0000085"
)
DATA = "a/:x:/[bold]b[/bold] [/]"  # an emoji, markup, and markup that does not parse
EMPTY = "a path: found an empty text, expected a file or a directory"


def ended(*arguments: object) -> object:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    return caught.value.code


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What engines were opened: absent while there was none."""
    file = tmp_path / "engine.log"
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    monkeypatch.setenv(fake_engine.LOG, str(file))
    return file


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("", EMPTY),
        (".", ".: found a directory, expected a file for the results"),
        ("/dev/full", "/dev/full: found no regular file, expected a file for the results"),
        (
            f"{SNAPSHOT}/axrl_metadata.json/results.jsonl",
            f"{SNAPSHOT}/axrl_metadata.json/results.jsonl: found no directory at "
            f"{SNAPSHOT}/axrl_metadata.json, expected a file for the results",
        ),
    ],
)
@pytest.mark.parametrize("command", [("replay", SNAPSHOT), ("sweep", SNAPSHOT), ("demo",)])
def test_results_that_have_no_place_are_refused_before_a_worker_starts(
    capsys: pytest.CaptureFixture[str],
    log: Path,
    command: tuple[object, ...],
    file: str,
    told: str,
) -> None:
    assert ended(*command, "--results", file) == ExitCode.USAGE
    assert capsys.readouterr() == ("", f"error (usage): {told}\n")
    assert not log.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", ""),
        ("replay", ""),
        ("sweep", ""),
        ("replay", SNAPSHOT, "--mitigations", ""),
        ("methods", "--results", ""),
    ],
)
def test_an_empty_path_is_not_the_current_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(SNAPSHOT)
    assert ended(*arguments) == ExitCode.USAGE
    assert capsys.readouterr().err == f"error (usage): {EMPTY}\n"


def test_the_current_directory_can_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SNAPSHOT)
    assert ended("show", ".") == ExitCode.GREEN
    assert "85" in capsys.readouterr().out


def test_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("case", DATA, as_json=False)
    stdout().print(key_value_table({"snapshot": DATA}))
    stdout().print(DATA)
    shown, told = capsys.readouterr()
    assert told == f"error (case): {DATA}\n"
    assert [line.rstrip() for line in shown.splitlines()] == [f"snapshot  {DATA}", DATA]


def test_a_path_in_an_error_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("show", DATA) == ExitCode.INPUT
    assert capsys.readouterr().err.startswith(f"error (case): {DATA}: found no such directory")


class Terminal(io.StringIO):
    """A terminal that keeps what it is shown."""

    def isatty(self) -> bool:
        return True


def test_a_bar_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with progress() as tell:
        tell(Step(case=":x: [b]", done=1, total=2, what="[i] :x:"))
    assert ":x: [b]" in terminal.getvalue()
    assert "1/2 [i] :x:" in terminal.getvalue()


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("as_json", [True, False])
def test_results_that_cannot_be_kept_are_shown_all_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    def full(*_: object) -> None:
        raise UsageError("results.jsonl: found no space left, expected some")

    monkeypatch.setattr(replays, "append_results", full)
    asked = ["replay", SNAPSHOT, "--results", tmp_path / "results.jsonl"]
    assert ended(*asked, *(["--json"] if as_json else [])) == ExitCode.USAGE
    told = capsys.readouterr()
    if as_json:
        document = json.loads(told.out)
        assert [r["experiment"] for r in document["results"]] == ["baseline"]
        assert document["error"]["code"] == "usage"
    else:
        assert "reproduced" in told.out and "no space left" in told.err


def test_a_fault_of_the_program_is_no_red_verdict(tmp_path: Path) -> None:
    """As a process: Python's own status for an unhandled exception is 1, that of a red verdict."""
    code = (
        "from replay_lib.cli import commands, main\n"
        "def broken(*_): raise ZeroDivisionError('by zero')\n"
        "commands.describe_snapshot = broken\n"
        "main(['show', 'x'])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.INTERNAL
    assert "ZeroDivisionError: by zero" in ran.stderr
