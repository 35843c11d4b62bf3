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
from replay_lib.record.baselines import Document, Entry, file_of, rendered
from replay_lib.record.environment import Environment
from replay_lib.rule import Verdict

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


def kept_of(case, method: str, verdict: str, norm: float, **environment: str) -> None:
    """A document of baselines beside ``case``: that of fake replays, or another environment's."""
    known = Environment.of("cpu", "float32", {"torch": "none"}).model_copy(update=environment)
    document = Document(
        schema=1,
        case_digest=Case.load(case).digest(),
        environment=known,
        deterministic=True,
        seconds=1.0,
        methods={method: Entry(norm=norm, verdict=Verdict(verdict), since="2026-01-01")},
    )
    file = file_of(case / "case.yaml", known)
    file.parent.mkdir(exist_ok=True)
    file.write_text(rendered(document))


METHOD = "disable-routing-replay"


def test_a_verdict_that_is_right_in_another_environment_is_held(case, capsys):
    shutil.rmtree(case / "baselines", ignore_errors=True)
    kept_of(case, METHOD, "pass", 1.0, device="cuda (NVIDIA H200)")
    before = (case / "case.yaml").read_bytes()
    code, told = pin(capsys, case, METHOD)
    (one,) = told["expected"]
    assert (code, told["written"], one["change"]) == (ExitCode.RED, False, "held")
    assert (one["before"], one["now"], one["after"]) == ("pass", "fail", "pass")
    assert one["held"].startswith("pass in the baselines of cuda-nvidia-h200-float32-")
    assert (case / "case.yaml").read_bytes() == before

    with pytest.raises(SystemExit):
        main(["pin", str(case), METHOD])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"fail here, but {one['held']}: kept" in shown
    assert f"spike-replay pin {case} {METHOD} --widen REASON; to overwrite: --replace" in shown


def test_a_verdict_that_was_this_environments_own_is_overwritten(case, capsys):
    shutil.rmtree(case / "baselines", ignore_errors=True)
    kept_of(case, METHOD, "pass", 1.0)
    kept_of(case, METHOD, "pass", 1.0, device="cuda (NVIDIA H200)")
    code, told = pin(capsys, case, METHOD)
    assert (code, told["expected"][0]["change"]) == (ExitCode.GREEN, "worse")


def test_where_the_figures_are_the_same_a_bit_equal_gradient_is_arithmetic(case, capsys):
    shutil.rmtree(case / "baselines", ignore_errors=True)
    write_expected(case, {METHOD: "no_op"})
    _, dry = pin(capsys, case, METHOD, "--replace", "--dry-run")
    assert dry["expected"][0]["change"] == "better"
    norm = fake_engine.NORMS[METHOD]
    kept_of(case, METHOD, "no_op", norm * (1 + 1e-7))
    code, told = pin(capsys, case, METHOD)
    assert (code, told["expected"][0]["change"]) == (ExitCode.RED, "held")
    why = "no_op in this environment's baseline, with the same figures"
    assert told["expected"][0]["held"] == why
    kept_of(case, METHOD, "no_op", norm * 1.01)
    code, told = pin(capsys, case, METHOD)
    assert (code, told["expected"][0]["change"]) == (ExitCode.GREEN, "better")


def test_widening_states_both_verdicts_and_why(case, capsys):
    _, told = pin(capsys, case, METHOD, "balance-negative-advantages", "--widen", "ratios are 1")
    assert [one["change"] for one in told["expected"]] == ["widened", "new"]
    lines = f"  {METHOD}:\n    verdicts: [pass, fail]\n    reason: ratios are 1\n"
    assert lines in (case / "case.yaml").read_text()
    assert Case.load(case).expected["balance-negative-advantages"].plain() == "partial"

    code, told = pin(capsys, case, METHOD)
    assert (code, told["written"], told["expected"][0]["change"]) == (0, False, "unchanged")
    code, told = pin(capsys, case, METHOD, "--replace")
    assert (code, told["expected"][0]["change"]) == (ExitCode.GREEN, "narrowed")
    assert Case.load(case).expected[METHOD].plain() == "fail"


def test_a_set_is_not_overwritten_by_a_verdict_outside_it(case, capsys):
    write_expected(case, {METHOD: {"verdicts": ["no_op", "partial"], "reason": "rounding"}})
    code, told = pin(capsys, case, METHOD)
    assert (code, told["expected"][0]["held"]) == (ExitCode.RED, "several verdicts are stated")
    _, told = pin(capsys, case, METHOD, "--widen", "another reason")
    assert told["expected"][0]["after"] == {
        "verdicts": ["no_op", "partial", "fail"],
        "reason": "rounding; another reason",
    }


def test_two_wishes_or_an_empty_reason_are_refused(case, capsys):
    for wrong in (["--widen", "why", "--replace"], ["--widen", " "]):
        code, told = pin(capsys, case, METHOD, *wrong)
        assert code == ExitCode.USAGE and "--widen" in told["error"]["message"]


def test_a_quoted_key_is_the_same_key(case, capsys):
    file = case / "case.yaml"
    file.write_text(file.read_text().replace("expected:\n", '"expected":\n'))
    pin(capsys, case, "disable-routing-replay")
    assert file.read_text().count("expected") == 1
