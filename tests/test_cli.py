"""The command line: what is printed where, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from cli_ran import Ran

from replay_lib import errors, run
from replay_lib.cli.views import _model_values
from replay_lib.exit_codes import MEANINGS, ExitCode
from replay_lib.methods import load_methods
from replay_lib.record import ledger
from replay_lib.record.results_file import read_results
from replay_lib.record.task import Task
from replay_lib.run import RECORDED_METHODS

CASE = Path(__file__).parents[1] / "spike_cases" / "axrl-plain-step85"
SNAPSHOT = CASE / "snapshot" / "iter_0000085"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model: norms by name."""
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "engine.log"))


@pytest.fixture
def spike_replay(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: Ran(capsys, *arguments)


def test_help_tells_commands_and_exit_codes(spike_replay: Any) -> None:
    ran = spike_replay("--help")
    assert ran.code == 0
    for command in ("show", "replay", "sweep", "methods", "demo", "export", "import", "guard"):
        assert f"\n  {command} " in ran.out
        assert spike_replay(command, "--help").code == 0
    for code in ExitCode:
        assert f"{code.value:>3}  {code.meaning}" in ran.out


def test_every_error_has_an_exit_code_of_the_table() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    known = {k for k in kinds if issubclass(k, errors.SpikeReplayError)}
    for kind in known - {errors.SpikeReplayError}:
        assert ExitCode(kind.exit_code) not in (ExitCode.GREEN, ExitCode.RED), kind
    assert set(MEANINGS) == set(ExitCode)


def test_show_tells_what_the_snapshot_states(spike_replay: Any) -> None:
    shown = spike_replay("show", SNAPSHOT, "--json").document
    assert shown["step"] == 85
    assert shown["grad_norm_preclip"] == 8.441921403762574
    assert shown["ratio"] == pytest.approx(4.0086799)
    assert shown["spike_settings"]["spike_ratio"] == 2.0
    assert [shown["parallel"][k] for k in ("world_size", "tp", "pp", "cp", "ep", "etp", "dp")] == [
        *(2, 1, 1, 1, 1, 1, 2)
    ]
    assert [rank["routing_payloads"] for rank in shown["ranks"]] == [15, 11]
    text = spike_replay("show", CASE)
    assert "case                    axrl-plain-step85" in text.out
    assert "sealed_files            16" in text.out
    assert "provenance              evidence=mechanism, trainer=AXRL at commit" in text.out
    assert "dp rank 1" in text.out


def test_show_tells_of_no_differences_where_there_are_none() -> None:
    assert _model_values([]) == {}


def test_methods_lists_all_registered(spike_replay: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    document = spike_replay("methods", "--json").document
    listed, source = document["methods"], document["results"]
    assert [m["slug"] for m in listed] == list(load_methods())
    assert source == {"file": None, "count": 0}
    by_slug = {m["slug"]: m for m in listed}
    assert by_slug["disable-routing-replay"]["status"] == "diagnostic"
    assert by_slug["enable-token-mismatch-tis-max2"] == {
        "slug": "enable-token-mismatch-tis-max2",
        "family": "settings",
        "seams": ["settings"],
        "status": "untried",
        "standing": None,
        "parameters": {"clip_max": 2.0},
        "needs": [],
        "diagnostic": False,
        "changes_unit": False,
        "summary": "Truncated importance weight old/rollout on the policy loss, capped at 2.",
        "source": "XYZ-AI-Lab/axrl, spike-mitigation-methods/enable-token-mismatch-tis-max2.md",
    }
    text = spike_replay("methods").out
    assert "settings" in text
    assert "status: no result is known; out/demo/results.jsonl is not there. Name a file" in text


def test_a_status_comes_from_results(spike_replay: Any, fake: None, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    snapshot = spike_replay("sweep", SNAPSHOT, *RECORDED_METHODS, "--results", file)
    assert snapshot.code == ExitCode.RED
    document = spike_replay("methods", "--results", file, "--json").document
    listed, source = document["methods"], document["results"]
    assert source == {"file": str(file), "count": 6}
    assert (
        f"status: the best of 6 results in {file}" in spike_replay("methods", "--results", file).out
    )
    tried = {m["slug"]: m["status"] for m in listed if m["slug"] in RECORDED_METHODS}
    told = {m["slug"]: m["standing"] for m in listed}
    assert told["enable-token-mismatch-tis-max2"] == (
        "proven (1 of 1 recorded; side effects not measured)"
    )
    assert tried == {
        "balance-negative-advantages": "partial",
        "disable-routing-replay": "diagnostic",
        "enable-token-mismatch-tis-max2": "proven",
        "replay-r3-on-loss-tokens-only": "proven",
        "use-current-routing-for-first-moe-layer": "proven",
    }
    spike_replay(
        "sweep", CASE, *RECORDED_METHODS, "--results", tmp_path / "case.jsonl"
    )  # its median was invented
    listed = spike_replay("methods", "--results", tmp_path / "case.jsonl", "--json").document
    assert "proven" not in {m["status"] for m in listed["methods"]}


@pytest.mark.usefixtures("fake")
def test_replay_prints_one_document(spike_replay: Any) -> None:
    ran = spike_replay("replay", CASE, "-m", "disable-routing-replay", "--json")
    assert ran.code == 0  # the case expects it to fail
    baseline, disabled = ran.document["results"]
    assert (baseline["experiment"], baseline["verdict"]) == ("baseline", "reproduced")
    assert (disabled["verdict"], disabled["expected"], disabled["red"]) == ("fail", "fail", False)
    assert disabled["fidelity"] == "folded"
    assert ran.document["refused"] == []
    assert "1/2 baseline: reproduced" in ran.err


@pytest.mark.usefixtures("fake")
def test_replay_shows_a_table_with_reasons(spike_replay: Any) -> None:
    ran = spike_replay("replay", SNAPSHOT, "-m", "balance-negative-advantages")
    assert ran.code == ExitCode.RED  # nothing is expected of a bare snapshot: it has to pass
    assert "8.441921404" in ran.out
    assert "- iter_0000085 / balance-negative-advantages: partial: norm 5 is 2.374 x" in ran.out


@pytest.mark.usefixtures("fake")
def test_against_and_reduced(spike_replay: Any) -> None:
    text = "balance-negative-advantages"
    ran = spike_replay(
        *("replay", SNAPSHOT, "-m", text, "--against", "disable-routing-replay"),
        *("--dp-ranks", "0", "--precision", "bfloat16", "--no-deterministic", "--json"),
    )
    result = ran.document["results"][1]
    assert (result["against"], result["compared_norm"]) == ("disable-routing-replay", 8.0)
    assert (result["fidelity"], result["dp_ranks"], result["dtype"]) == ("reduced", [0], "bfloat16")
    assert result["status"] == "partial"
    told = spike_replay("replay", SNAPSHOT, "--dp-ranks", "0")
    assert "not full-fidelity" in told.out


@pytest.mark.usefixtures("fake")
def test_results_are_appended(spike_replay: Any, tmp_path: Path) -> None:
    file = tmp_path / "kept" / "results.jsonl"
    for _ in range(2):
        spike_replay("replay", CASE, "--results", file)
    assert [r.experiment for r in read_results(file)] == ["baseline", "baseline"]


def test_one_refused_method_does_not_take_the_others_along(
    spike_replay: Any, fake: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "refuse.log"))
    ran = spike_replay("sweep", CASE, *sorted(RECORDED_METHODS), "--json")
    assert ran.code == ExitCode.MODEL
    assert [r["experiment"] for r in ran.document["results"]] == [
        "baseline",
        "balance-negative-advantages",
        "disable-routing-replay",
        "enable-token-mismatch-tis-max2",
        "use-current-routing-for-first-moe-layer",
    ]
    assert ran.document["refused"] == [
        {
            "case": "axrl-plain-step85",
            "experiment": "replay-r3-on-loss-tokens-only",
            "code": "batch",
            "message": "batch of dp rank 0: column 'loss_mask' is absent",
        }
    ]
    # the session survived, and what was known was not replayed again
    log = (tmp_path / "refuse.log").read_text().split("\n")
    assert sum(" open " in line for line in log) == 1
    assert sum("run enable" in line for line in log) == 1


EXPECTING = """\
schema: 1
snapshot: iter_0000085
quiet: quiet
expected:
  enable-token-mismatch-tis-max2: pass
  use-current-routing-for-first-moe-layer: pass
  replay-r3-on-loss-tokens-only: degenerate
  balance-negative-advantages: partial
  disable-routing-replay: fail
  enable-token-mismatch-tis-max2:clip_max=1.5: pass
"""


@pytest.fixture
def embedded(fake: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One embedded case with a quiet control, one expected verdict of each kind, all to be met."""
    monkeypatch.setitem(fake_engine.RETAINED, fake_engine.REFUSED, 0.1)
    case = tmp_path / "cases" / "a-spike"
    case.mkdir(parents=True)
    (case / "iter_0000085").symlink_to(SNAPSHOT)
    fake_engine.quiet_snapshot(case / "quiet", SNAPSHOT)
    (case / "case.yaml").write_text(EXPECTING)
    monkeypatch.setattr("replay_lib.demo.builtin_cases", lambda: tmp_path / "cases")
    return case


def test_demo(spike_replay: Any, embedded: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    ran = spike_replay("demo", "--results", file)
    assert ran.code == 0
    for method in run.RECORDED_METHODS:
        assert f"a-spike / {method}: " in ran.out
    assert "recorded norm  replayed norm" in ran.out
    assert "\na-spike: folded, float32 on cpu\n" in ran.out
    lines = {line.split()[0]: line.split() for line in ran.out.splitlines() if "%" in line}
    assert lines["balance-negative-advantages"][-3:] == ["-75%", "0.980", "partial"]
    assert lines["disable-routing-replay"][-3:] == ["+5.0%", "0.980", "fail"]
    assert f"Results: {file}. It took " in ran.out
    # a method that the case alone expects something of is replayed too
    asked = ["baseline", *run.RECORDED_METHODS, "enable-token-mismatch-tis-max2:clip_max=1.5"]
    assert [r.experiment for r in read_results(file)] == asked
    document = spike_replay("demo", "--results", file, "--json").document
    assert document["file"] == str(file)
    effect = document["results"][4]["side_effect"]
    assert (effect["quiet_norm"], effect["quiet_baseline_norm"]) == (0.5, 2.0)
    assert (effect["change"], effect["verdict"]) == (-0.75, "not_a_spike")


@pytest.mark.parametrize("method", run.RECORDED_METHODS)
def test_demo_is_red_where_a_verdict_is_worse_than_expected(
    spike_replay: Any, embedded: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fake_engine.NORMS, method, float("nan"))
    ran = spike_replay("demo", "--results", tmp_path / "results.jsonl")
    assert ran.code == ExitCode.RED
    assert f"a-spike / {method}: non_finite: " in ran.out


def test_demo_is_red_where_the_quiet_control_is_a_spike(
    spike_replay: Any, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fake_engine.QUIET_NORMS, "baseline", 4.0)
    shutil.rmtree(embedded / "quiet")
    fake_engine.quiet_snapshot(embedded / "quiet", SNAPSHOT, 4.0)
    ran = spike_replay("demo", "--results", tmp_path / "results.jsonl")
    assert ran.code == ExitCode.RED
    assert ran.out.count("a-spike: the quiet control is itself a spike: its baseline is") == 1
    assert " RED " in ran.out


@pytest.mark.usefixtures("fake")
def test_an_invented_median_is_told(spike_replay: Any) -> None:
    assert "the mechanism, not a method's worth" in spike_replay("replay", CASE).out


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (
            ("show", "nowhere"),
            ExitCode.INPUT,
            {
                "code": "case",
                "message": "nowhere: found no such directory, "
                "expected a case directory or a snapshot iter_*",
            },
        ),
        (
            ("replay", SNAPSHOT, "--dp-ranks", "a"),
            ExitCode.USAGE,
            {"code": "usage", "message": "--dp-ranks: found 'a', expected numbers as in 0,1"},
        ),
        (
            ("replay", SNAPSHOT, "-m", "disable-routing-replay:x=1"),
            ExitCode.PATCH,
            {
                "code": "patch",
                "message": "mitigation disable-routing-replay: unknown parameter x; known: none",
            },
        ),
        (
            ("nosuch",),
            ExitCode.USAGE,
            {"code": "usage", "message": "No such command 'nosuch'."},
        ),
    ],
)
def test_errors_are_one_document_or_one_line(
    spike_replay: Any, arguments: tuple[object, ...], code: ExitCode, error: dict[str, str]
) -> None:
    ran = spike_replay(*arguments, "--json")
    assert (ran.code, ran.document, ran.err) == (code, {"error": error}, "")
    plain = spike_replay(*arguments)
    assert (plain.code, plain.out) == (code, "")
    assert plain.err.strip() == f"error ({error['code']}): {error['message']}"


def test_no_arguments_is_help_and_a_usage_error(spike_replay: Any) -> None:
    ran = spike_replay()
    assert ran.code == ExitCode.USAGE
    assert "Usage: spike-replay" in ran.err


def test_an_internal_fault_is_still_one_document(
    spike_replay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("replay_lib.cli.commands.describe_snapshot", broken)
    ran = spike_replay("show", SNAPSHOT, "--json")
    assert (ran.code, ran.document) == (
        ExitCode.INTERNAL,
        {"error": {"code": "internal", "message": "ZeroDivisionError: by zero"}},
    )


def test_the_real_thing_twice_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "replay_lib.cli", "replay", str(SNAPSHOT), "--json"]
    command += ["--task", "job"]
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    runs = [
        json.loads(
            subprocess.run(command, env=env, check=True, capture_output=True, cwd=tmp_path).stdout
        )
        for _ in range(2)
    ]
    (first,), (second,) = (one["results"] for one in runs)
    assert first["fidelity"] == "folded"
    assert first["relative_difference"] <= 1e-5  # float32 sums in another order
    assert (first["deterministic"], first["verdict"]) == (True, "reproduced")
    assert first["digest"] == second["digest"]
    assert first["grad_norm_preclip"] == second["grad_norm_preclip"]
    events = ledger.read(Task("job", tmp_path))
    assert [e.data["result"] for e in events if e.kind == "result"] == [first, second]
    assert Task("job", tmp_path).file.read_text().count("| reproduced ") >= 2
