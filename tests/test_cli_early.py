"""The command line: what cannot work is told before a worker starts, with what to do instead."""

from __future__ import annotations

import sys
from pathlib import Path

import fake_engine
import pytest
from cli_ran import Ran

from replay_lib import run
from replay_lib.cli import entry, main
from replay_lib.exit_codes import ExitCode

CASES = Path(__file__).parents[1] / "spike_cases"
CASE = CASES / "axrl-plain-step85"

EARLY = {
    "module": (
        ("--trainer", "no_such_module:nope"),
        ExitCode.PATCH,
        "trainer no_such_module:nope: module 'no_such_module' cannot be imported: ",
    ),
    "factory": (
        ("--trainer", "odd_trainers:nope"),
        ExitCode.PATCH,
        "trainer odd_trainers:nope: found nothing under the name 'nope' in ",
    ),
    "rows": (
        ("--rows", "merged"),
        ExitCode.USAGE,
        f"{CASE}/snapshot/iter_0000085: rows: found merged asked for where no row is a prefix ",
    ),
    "device": (
        ("--device", "cuda"),
        ExitCode.USAGE,
        "--device: found cuda, but no NVIDIA device is visible here (CUDA_VISIBLE_DEVICES is ''), ",
    ),
    "repeats": (
        ("--repeats", "1"),
        ExitCode.USAGE,
        "--repeats: found 1, expected 2 or more: one replay of the baseline shows no spread",
    ),
}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What engines were opened: absent while there was none."""
    file = tmp_path / "engine.log"
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    monkeypatch.setenv(fake_engine.LOG, str(file))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "trainers"))
    return file


def ended(*arguments: object) -> object:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    return caught.value.code


@pytest.mark.parametrize("command", ["replay", "sweep"])
@pytest.mark.parametrize("what", EARLY)
def test_what_cannot_work_is_told_before_a_worker_starts(
    capsys: pytest.CaptureFixture[str], log: Path, command: str, what: str
) -> None:
    options, code, told = EARLY[what]
    assert ended(command, CASE, *options) == code
    shown, error = capsys.readouterr()
    assert shown == "" and told in error
    assert not log.exists()


def test_axrl_that_cannot_be_imported_is_told_before_a_worker_starts(
    capsys: pytest.CaptureFixture[str], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    assert ended("replay", CASE, "--trainer", "axrl") == ExitCode.PATCH
    told = "trainer axrl: Python: found 3.11, expected 3.12 or later, which AXRL's syntax needs. "
    assert told in capsys.readouterr().err
    assert not log.exists()


@pytest.mark.parametrize("command", ["show", "replay", "sweep", "doctor", "pin"])
def test_a_directory_of_cases_names_them(
    capsys: pytest.CaptureFixture[str], log: Path, command: str
) -> None:
    assert ended(command, CASES) == ExitCode.INPUT
    told = capsys.readouterr().err
    assert f"error (case): {CASES}: found a directory of 6 case(s), expected one case, " in told
    assert "Name one of them: axrl-plain-step85, zoo-misaligned-rows, zoo-natural, " in told
    assert told.endswith(f"; all of them are tried by pytest --spike-cases={CASES}\n")
    assert not log.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", CASE, "-m", "disble-routing-replay"),
        ("replay", CASE, "--against", "disble-routing-replay"),
        ("sweep", CASE, "clip-advantages+disble-routing-replay"),
        ("pin", CASE, "disble-routing-replay"),
    ],
)
def test_a_misspelt_method_is_told_the_nearest(
    capsys: pytest.CaptureFixture[str], log: Path, arguments: tuple[object, ...]
) -> None:
    assert ended(*arguments) == ExitCode.PATCH
    assert "; did you mean disable-routing-replay" in capsys.readouterr().err
    assert not log.exists()


@pytest.mark.parametrize("command", ["replay", "pin"])
def test_a_misspelt_expectation_names_its_file(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "iter_0000085").symlink_to(CASE / "snapshot/iter_0000085")
    file = tmp_path / "case.yaml"
    file.write_text("schema: 1\nsnapshot: iter_0000085\nexpected: {disble-routing-replay: fail}\n")
    assert ended(command, tmp_path) == ExitCode.PATCH
    told = capsys.readouterr().err
    assert f"{file}: expected: mitigation disble-routing-replay: not registered; did you " in told
    assert not log.exists()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), ValueError("odd")])
def test_task_files_that_cannot_be_rendered_change_no_exit_status(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> tuple[str, ...]:
        raise error

    monkeypatch.setattr(entry, "render_stale", fail)
    ran = Ran(capsys, "methods", "--json")
    assert (ran.code, bool(ran.document["methods"])) == (0, True)
    assert "task files were not rendered" in ran.err
