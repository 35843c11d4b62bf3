"""``spike-replay guard``: what it prints, writes and ends with. No model: norms by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fake_engine
import pytest
import torch

from replay_lib import run
from replay_lib.cli import main
from replay_lib.errors import TrainerError
from replay_lib.guard import guarding

CASES = Path(__file__).parents[2] / "spike_cases"
CASE = CASES / "axrl-plain-step85"
METHODS = ("disable-routing-replay", "balance-negative-advantages", "use-tis-loss")
#: Norms under a trainer, where they differ from the fake engine's.
OTHERS: dict[str, dict[str, float]] = {
    "mine:sound": {},
    "mine:one_method": {"balance-negative-advantages": 8.0, "disable-routing-replay": 2.6},
    "mine:baseline": {"baseline": 9.0},
    "mine:rounding": {"use-tis-loss": 2.5 * (1 + 1e-6)},
}


class TwoTrainers(fake_engine.FakeEngine):
    """Norms of the trainer that is asked for; gradients of one number."""

    def __init__(self, snapshot: Path, options: run.ReplayOptions) -> None:
        if options.trainer == "mine:broken":
            raise TrainerError("trainer mine:broken: factory 'broken' raised KeyError: 'x'")
        super().__init__(snapshot, options)
        self.norms = OTHERS.get(options.trainer or "", {})

    def run_many(self, experiments: Any) -> Any:
        for outcome in super().run_many(experiments):
            norm = self.norms.get(outcome.experiment.name, outcome.grad_norm_preclip)
            told = {"grad_norm_preclip": norm, "digest": f"digest of {norm}"}
            yield outcome.model_copy(update=told)

    def save_gradients(self, experiment: Any, path: Path) -> None:
        (outcome,) = self.run_many([experiment])
        torch.save({"w": torch.tensor([outcome.grad_norm_preclip])}, path)


@pytest.fixture
def guard(monkeypatch, capsys):
    """Run the command; (exit code, stdout)."""
    monkeypatch.setattr(run, "open_engine", TwoTrainers)
    monkeypatch.setattr(guarding, "open_engine", TwoTrainers)

    def ran(trainer: str, *more: object, cases: Path = CASE) -> tuple[Any, str]:
        methods = [part for m in METHODS for part in ("-m", m)]
        given = ["guard", str(cases), "--trainer", trainer, "--against", "grpo", *methods, *more]
        with pytest.raises(SystemExit) as ended:
            main([str(g) for g in given])
        return ended.value.code, capsys.readouterr().out

    return ran


def test_only_what_changed_is_printed(guard):
    code, out = guard("mine:one_method")
    assert code == 1
    assert out.splitlines() == [
        "changed axrl-plain-step85 / disable-routing-replay: verdict fail -> pass; norm 8 -> 2.6 "
        "(-67.50%, arithmetic explains 1e-05); the gradient is scaled by 0.325, its direction "
        "kept (cosine 1.000000 to the reference's): a denominator, an aggregation or a factor of "
        "the loss",
        "WORSE   axrl-plain-step85 / balance-negative-advantages: verdict partial -> fail; norm "
        "5 -> 8 (+60.00%, arithmetic explains 1e-05); the gradient is scaled by 1.6, its "
        "direction kept (cosine 1.000000 to the reference's): a denominator, an aggregation or a "
        "factor of the loss",
        "mine:one_method against grpo: 4 experiments of 1 case, 2 changed, 1 of them for the worse",
    ]


def test_nothing_changed_is_one_line_and_green(guard):
    for trainer in ("mine:sound", "mine:rounding"):
        code, out = guard(trainer, "--fail-on", "changed")
        assert code == 0
        assert out == f"{trainer} against grpo: 4 experiments of 1 case, nothing changed\n"


def test_a_baseline_that_moved_takes_its_methods_along_in_one_line(guard):
    code, out = guard("mine:baseline")
    first, second, last = out.splitlines()
    assert code == 1
    assert first.startswith("WORSE   axrl-plain-step85 / baseline: verdict reproduced -> not_repr")
    assert second == "WORSE   axrl-plain-step85 / 3 methods: as the baseline"
    assert last.endswith("4 changed, 4 of them for the worse")


def test_a_trainer_that_cannot_be_loaded_is_worse(guard):
    code, out = guard("mine:broken", cases=CASES)
    assert code == 1
    assert out.count("cannot be replayed any more (trainer): trainer mine:broken: factory") == 6


def test_all_files_are_written(guard, tmp_path):
    files = {
        "--junit": tmp_path / "out" / "guard.xml",
        "--json-lines": tmp_path / "out" / "guard.jsonl",
        "--summary": tmp_path / "out" / "guard.md",
        "--results": tmp_path / "out" / "results.jsonl",
    }
    code, out = guard("mine:one_method", *(x for pair in files.items() for x in pair), "--json")
    assert code == 1
    document = json.loads(out)
    lines = [json.loads(line) for line in files["--json-lines"].read_text().splitlines()]
    assert document["experiments"] == lines
    assert [d["change"] for d in lines] == [None, "changed", "worse", None]
    assert lines[2]["cosine"] == 1.0 and lines[2]["tested"]["verdict"] == "fail"
    suite = ElementTree.parse(files["--junit"]).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("4", "1")
    assert [len(test.findall("failure")) for test in suite] == [0, 0, 1, 0]
    rows = [line for line in files["--summary"].read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 and "balance-negative-advantages" in rows[-1]
    assert len(files["--results"].read_text().splitlines()) == 4


def test_what_only_changed_is_red_where_that_is_asked_for(guard, monkeypatch):
    better = {"mine:better": {"disable-routing-replay": 2.6}}
    monkeypatch.setattr(__import__(__name__), "OTHERS", OTHERS | better)
    assert guard("mine:better")[0] == 0
    assert guard("mine:better", "--fail-on", "changed")[0] == 1


def test_a_reference_that_does_not_reproduce_is_told(guard, monkeypatch):
    monkeypatch.setattr(fake_engine, "NORMS", {**fake_engine.NORMS, "baseline": 9.0})
    code, out = guard("mine:sound")
    assert code == 0
    assert "under the reference too the baseline is not_reproduced" in out.splitlines()[0]
