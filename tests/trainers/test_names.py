"""How a trainer is named, at both doors and in the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_lib.cli import main
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import UsageError
from replay_lib.trainers.names import check_name

SNAPSHOT = Path(__file__).parents[2] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


@pytest.mark.parametrize("name", ["grpo", "axrl", "my_trainer:make", "a.b.c:make"])
def test_names_of_trainers(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "GRPO", "verl", "a.b", ":make", "a:", "a-b:make", "a:b:c"])
def test_other_texts_name_none(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_name(name)
    assert str(caught.value) == (
        f"trainer {name!r}: expected grpo (the built-in loss), axrl (the installed trainer's own) "
        "or module:factory"
    )


def test_a_session_is_not_even_started_for_one(monkeypatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(UsageError, match="trainer 'verl'"):
        ReplaySession.open(SNAPSHOT, device="cpu", trainer="verl")


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_a_command_is_called_wrongly_with_one(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, str(SNAPSHOT), "--trainer", "verl", "--json"])
    assert left.value.code == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "usage" and error["message"].startswith("trainer 'verl'")


def test_the_plugin_ends_the_run_with_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_spike(case, replay): replay()")
    ended = pytester.runpytest_subprocess("--trainer", "verl")
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["ERROR: trainer 'verl': expected grpo*"])
