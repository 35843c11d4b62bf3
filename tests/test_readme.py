"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from replay_lib.case import CaseFile
from replay_lib.cli import commands
from replay_lib.exit_codes import MEANINGS
from replay_lib.methods import load_methods
from replay_lib.record.result import Result
from replay_lib.rule import Flag, Verdict
from replay_lib.run import RECORDED_METHODS

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
    named = set(re.findall(r"spike-replay (\w+)", README))
    assert named | {"demo"} == set(known)  # the demonstration is told as make demo
    options = {o for command in known.values() for p in command.params for o in p.opts}
    plugin = (ROOT / "replay_lib/pytest_plugin.py").read_text()
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
    assert CaseFile.model_validate(yaml.safe_load(text)).expected


def test_its_mitigation_loads_from_a_directory(tmp_path):
    (source,) = [b for b in blocks("python") if "@mitigation" in b]
    (tmp_path / "clip_advantages.py").write_text(source)
    method = load_methods([tmp_path])["clip-advantages"]
    (patch,) = method.patches({"bound": 1.0})
    assert patch.seam == "batch"


def test_its_transcript_has_the_recorded_methods():
    table = README.split("<!-- transcript -->")[1].split("```")[1]
    assert [line.split()[0] for line in table.splitlines()[-5:]] == list(RECORDED_METHODS)


@pytest.mark.xdist_group("engine-plain")
def test_the_figures_of_its_transcript_come_out(tmp_path):
    from replay_lib.demo import run_demo
    from replay_lib.record.table import reproduction_table
    from replay_lib.run import ReplayOptions

    replayed = run_demo(ReplayOptions(device="cpu"), tmp_path / "r.jsonl", lambda _step: None)
    table = README.split("<!-- transcript -->")[1].split("```")[1]
    assert reproduction_table(replayed.results).splitlines()[-1] in table
    for result in replayed.results:
        (line,) = [x for x in table.splitlines() if x.startswith(result.experiment)]
        words = line.split()
        assert words[-1] == result.verdict
        # six figures are shown; the last one may differ between builds of torch
        assert float(words[1]) == pytest.approx(result.grad_norm_preclip, rel=1e-5)
