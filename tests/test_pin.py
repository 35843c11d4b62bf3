"""Verdicts pinned into a case.yaml by a command: as they fall, and nothing else changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fake_engine
import pytest

from replay_lib import run
from replay_lib.case import Case
from replay_lib.case_files import write_expected
from replay_lib.cli import main
from replay_lib.exit_codes import ExitCode

EMBEDDED = Path(__file__).parents[1] / "spike_cases/axrl-plain-step85"


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A copy of the embedded case that expects one verdict, which is better than what comes."""
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    directory = tmp_path / "a-case"
    shutil.copytree(EMBEDDED, directory)
    file = directory / "case.yaml"
    head, rest = file.read_text().split("expected:\n")
    kept = rest[rest.index("\nprovenance:") + 1 :]
    file.write_text(f"{head}# a word of mine\nexpected:\n  disable-routing-replay: pass\n{kept}")
    return directory


def pin(capsys, *arguments: object) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        main(["pin", *map(str, arguments), "--json"])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


def test_verdicts_are_written_as_they_fall_and_the_rest_of_the_file_stays(case, capsys):
    before = (case / "case.yaml").read_text()
    code, told = pin(capsys, case, "disable-routing-replay", "balance-negative-advantages")
    assert (code, told["written"]) == (ExitCode.GREEN, True)
    assert [(e["experiment"], e["before"], e["after"], e["change"]) for e in told["expected"]] == [
        ("disable-routing-replay", "pass", "fail", "worse"),
        ("balance-negative-advantages", None, "partial", "new"),
    ]
    after = (case / "case.yaml").read_text()
    lines = "  disable-routing-replay: fail\n  balance-negative-advantages: partial\n"
    assert after == before.replace("  disable-routing-replay: pass\n", lines)
    stated = {name: str(v) for name, v in Case.load(case).expected.items()}
    assert stated == {
        "disable-routing-replay": "fail",
        "balance-negative-advantages": "partial",
    }


def test_pinning_again_changes_nothing(case, capsys):
    pin(capsys, case, "balance-negative-advantages")
    before = (case / "case.yaml").read_bytes()
    code, told = pin(capsys, case, "balance-negative-advantages")
    assert (code, told["written"]) == (ExitCode.GREEN, False)
    assert (case / "case.yaml").read_bytes() == before


def test_a_dry_run_tells_and_writes_nothing(case, capsys):
    before = (case / "case.yaml").read_bytes()
    _, told = pin(capsys, case, "disable-routing-replay", "--dry-run")
    assert told["written"] is False and told["expected"][0]["change"] == "worse"
    assert (case / "case.yaml").read_bytes() == before


def test_a_method_that_the_case_cannot_take_is_told_and_the_others_are_pinned(
    case, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "refuse.log"))
    code, told = pin(capsys, case, fake_engine.REFUSED, "balance-negative-advantages")
    assert code == ExitCode.MODEL and told["written"] is True
    assert [r["experiment"] for r in told["refused"]] == [fake_engine.REFUSED]
    assert fake_engine.REFUSED not in Case.load(case).expected


def test_a_spike_that_does_not_come_out_again_pins_nothing(case, capsys, monkeypatch):
    monkeypatch.setitem(fake_engine.NORMS, "baseline", 4.0)
    before = (case / "case.yaml").read_bytes()
    code, told = pin(capsys, case, "disable-routing-replay")
    assert code == ExitCode.INPUT and "nothing was pinned" in told["error"]["message"]
    assert "not_reproduced" in told["error"]["message"]
    assert (case / "case.yaml").read_bytes() == before


def test_a_bare_snapshot_is_no_case(case, capsys):
    code, told = pin(capsys, case / "snapshot/iter_0000085", "disable-routing-replay")
    assert code == ExitCode.INPUT and "found no case.yaml" in told["error"]["message"]


def test_the_table_is_for_people(case, capsys):
    with pytest.raises(SystemExit):
        main(["pin", str(case), "disable-routing-replay"])
    shown = capsys.readouterr().out
    assert "a-case: case.yaml was written" in shown and "worse" in shown


def test_what_somebody_else_pinned_meanwhile_is_kept(case, capsys, monkeypatch):
    real = fake_engine.FakeEngine.run_many

    def meanwhile(self, experiments):
        write_expected(case, {"clip-advantages": "partial"})
        return real(self, experiments)

    monkeypatch.setattr(fake_engine.FakeEngine, "run_many", meanwhile)
    pin(capsys, case, "balance-negative-advantages")
    expected = Case.load(case).expected
    assert {"clip-advantages", "balance-negative-advantages"} <= set(expected)


def test_a_quoted_key_is_the_same_key(case, capsys):
    file = case / "case.yaml"
    file.write_text(file.read_text().replace("expected:\n", '"expected":\n'))
    pin(capsys, case, "disable-routing-replay")
    assert file.read_text().count("expected") == 1
