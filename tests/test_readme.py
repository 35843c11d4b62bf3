"""What the README says is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from replay_lib.case import Case, CaseFile
from replay_lib.cli import commands
from replay_lib.exit_codes import MEANINGS
from replay_lib.methods import load_methods
from replay_lib.record.result import Result, SideEffect
from replay_lib.record.table import CASE_COLUMNS, case_line, reproduction_table
from replay_lib.rule import Flag, Verdict
from replay_lib.run import RECORDED_METHODS, ReplayOptions, parse_experiments, replay_case

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_exit_codes_are_those_of_the_program():
    table = README.split("<!-- exit codes -->")[1].strip().split("\n\n")[0]
    rows = [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    assert table.splitlines()[2:] == rows


def test_every_command_and_option_it_names_exists():
    known = get_command(commands.app).commands
    named = set(re.findall(r"spike-replay (\w[\w-]*)", README))
    assert named | {"demo"} == set(known)  # the demonstration is told as make demo
    nested = [c for group in known.values() for c in getattr(group, "commands", {}).values()]
    options = {o for command in [*known.values(), *nested] for p in command.params for o in p.opts}
    plugin = (ROOT / "replay_lib/pytest_options.py").read_text()
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)):
        assert option in options or f'"{option}"' in plugin, option


def test_every_verdict_and_every_key_of_a_result_is_explained():
    for word in [*Verdict, Flag.OLD_SENSITIVE]:
        if word is not Verdict.NOT_APPLICABLE:  # no built-in method acts after the norm
            assert f"`{word}`" in README, word
    keys = README.split("in this order: ")[1].split(", and some more")[0]
    named = re.findall(r"`(\w+)`", keys)
    assert named == list(Result.model_fields)[: len(named)] and len(named) == 20


def test_its_case_file_is_a_case_file():
    (text,) = blocks("yaml")
    read = CaseFile.model_validate(yaml.safe_load(text))
    assert read.expected and read.quiet and read.provenance.command


def test_its_tests_are_those_of_this_suite():
    (source,) = [b for b in blocks("python") if "def test_" in b]
    own = ast.parse((ROOT / "tests/test_spike_cases.py").read_text())
    bodies = {f.name: ast.unparse(f.body) for f in own.body if isinstance(f, ast.FunctionDef)}
    told = [f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)]
    assert [f.name for f in told] == ["test_mitigation", "test_quiet_control"]
    for function in told:
        assert ast.unparse(function.body) == bodies[function.name]


def test_its_way_to_seal_a_case_works(tmp_path):
    (line,) = [x for x in README.splitlines() if "case_files" in x and "python -c" in x]
    code = line.split("'")[1].replace("spike_cases/NAME", str(tmp_path))
    (tmp_path / "iter_0000085").mkdir()
    (tmp_path / "iter_0000085" / "file").touch()
    (tmp_path / "case.yaml").write_text("schema: 1\nsnapshot: iter_0000085\n")
    exec(code, {})
    assert list(Case.load(tmp_path).sha256) == ["iter_0000085/file"]


def test_every_key_of_a_side_effect_it_names_exists():
    named = README.split("case's quiet control: ")[1].split(".\n")[0]
    assert set(re.findall(r"`(\w+)`", named)) <= set(SideEffect.model_fields)


def test_its_mitigation_loads_from_a_directory(tmp_path):
    (source,) = [b for b in blocks("python") if "@mitigation" in b]
    (tmp_path / "damp_advantages.py").write_text(source)
    method = load_methods([tmp_path])["damp-advantages"]
    (patch,) = method.patches({"bound": 1.0})
    assert patch.seam == "batch"


def test_its_transcript_has_the_recorded_methods():
    table = README.split("<!-- transcript -->")[1].split("```")[1]
    assert [line.split()[0] for line in table.splitlines()[-5:]] == list(RECORDED_METHODS)
    titles = next(line for line in table.splitlines() if line.startswith("experiment"))
    assert [x.strip() for x in re.split(r"\s{2,}", titles)] == [name for name, _ in CASE_COLUMNS]


@pytest.mark.xdist_group("engine-plain")
def test_the_figures_of_its_transcript_come_out():
    table = README.split("<!-- transcript -->")[1].split("```")[1]
    name = "axrl-plain-step85"
    experiments = parse_experiments(RECORDED_METHODS, "baseline", load_methods())
    case = Case.load(ROOT / "spike_cases" / name)
    results = replay_case(case, experiments, ReplayOptions(device="cpu")).results
    assert reproduction_table(results).splitlines()[-1] in table
    own = table.split(f"{case_line(results[0])}\n")[1].split("\n\n")[0]
    for result in results:
        (line,) = [x for x in own.splitlines() if x.startswith(result.experiment)]
        shown = re.split(r"\s{2,}", line)
        # six figures are shown; the last one may differ between builds of torch
        assert float(shown[1]) == pytest.approx(result.grad_norm_preclip, rel=1e-5)
        assert shown[4:] == [cell(result) for _, cell in CASE_COLUMNS[4:]]
