"""Options of the command line reach the engine and the results, or are a wrong call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_engine
import pytest
from cli_ran import Ran

from replay_lib import run
from replay_lib.exit_codes import ExitCode

CASE = Path(__file__).parents[1] / "spike_cases" / "axrl-plain-step85"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model: norms by name."""
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "engine.log"))


@pytest.fixture
def spike_replay(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: Ran(capsys, *arguments)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("command", [("replay", CASE, "-m"), ("sweep", CASE)])
def test_trainer_and_backend_reach_the_engine_and_the_results(
    spike_replay: Any, command: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "trainers"))
    method, more = "disable-routing-replay", ("--trainer", "odd_trainers:grpo", "--json")
    results = spike_replay(*command, method, *more).document["results"]
    assert {(r["trainer"], r["backend"]) for r in results} == {("odd_trainers:grpo", "native")}
    results = spike_replay(*command, method, "--backend", "axrl", "--json").document["results"]
    assert {r["backend"] for r in results} == {"axrl"}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("command", [("replay", CASE, "-m"), ("sweep", CASE)])
def test_the_layout_reaches_the_engine_and_the_results(
    spike_replay: Any, command: tuple[object, ...]
) -> None:
    ran = spike_replay(*command, "disable-routing-replay", "--layout", "ep=2,tp=2", "--json")
    sizes = {"tp": 2, "pp": 1, "cp": 1, "ep": 2, "dp": 1}
    assert [r["layout"] for r in ran.document["results"]] == [sizes, sizes]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--layout", "vpp=2"), "layout 'vpp=2': found 'vpp=2', expected sizes as in tp=2"),
        (
            ("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:9", "--layout", "tp=3"),
            "layout tp=3: 3 rank(s) cannot be shared out evenly over 2 nodes",
        ),
        (("--nnodes", "2"), "--nnodes: found without --rdzv-endpoint, expected both"),
        (
            ("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:9", "--backend", "axrl"),
            "backend axrl: it cannot honour --nnodes",
        ),
        (("--layout", "tp=2", "--backend", "axrl"), "backend axrl: it cannot honour --layout"),
    ],
)
def test_a_layout_that_cannot_be_is_a_wrong_call(
    spike_replay: Any, options: tuple[str, ...], words: str
) -> None:
    ran = spike_replay("replay", CASE, *options, "--json")
    assert ran.code == ExitCode.USAGE
    assert words in ran.document["error"]["message"]


def test_a_trainer_that_a_backend_cannot_take_is_a_wrong_call(spike_replay: Any) -> None:
    ran = spike_replay("replay", CASE, "--backend", "axrl", "--trainer", "grpo", "--json")
    assert ran.code == ExitCode.USAGE
    assert "backend axrl: it cannot honour --trainer" in ran.document["error"]["message"]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--budget", "many", "Invalid value for '--budget': "),
        ("--device", "tpu", "Invalid value for '--device': "),
    ],
)
def test_a_value_that_cannot_be_read_is_told_with_its_option(
    spike_replay: Any, option: str, value: str, told: str
) -> None:
    ran = spike_replay("sweep", CASE, "--combine", "2", option, value, "--json")
    assert ran.code == ExitCode.USAGE
    assert ran.document["error"]["message"].startswith(told)
