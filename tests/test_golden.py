"""Agreement with values computed by AXRL's own code: one test a recorded case.

``pytest tests --golden DIR -k golden`` runs another directory of the same schema.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import golden_support
import pytest
from golden_support import GoldenCase


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_case" in metafunc.fixturenames:
        cases = golden_support.load(Path(metafunc.config.getoption("--golden")))
        metafunc.parametrize("golden_case", cases, ids=[case.id for case in cases])


@pytest.mark.golden
def test_golden(golden_case: GoldenCase) -> None:
    golden_support.check(golden_case)


def run_pytest(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", __file__, "--golden", str(directory)]
    options = ["-q", "-p", "no:cacheprovider", "-k", "test_golden["]
    root = Path(__file__).parents[1]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, cwd=root
    )


def test_a_directory_without_cases_is_red_story(tmp_path: Path) -> None:
    empty = run_pytest(tmp_path)
    assert empty.returncode == 1, empty.stdout
    assert f"no golden cases in {tmp_path}" in empty.stdout

    absent = run_pytest(tmp_path / "absent")
    assert absent.returncode == 1, absent.stdout


def test_another_directory_is_run_case_by_case_story(tmp_path: Path) -> None:
    own = Path(__file__).parent / "data" / "golden"
    lines = (own / "loss_cases.jsonl").read_text().splitlines()[:3]
    target = tmp_path / "loss_cases.jsonl"
    target.write_text("\n".join(lines) + "\n")
    green = run_pytest(tmp_path)
    assert green.returncode == 0, green.stdout
    assert "3 passed" in green.stdout

    changed = json.loads(lines[1])
    changed["expected"]["denom"] += 1
    target.write_text("\n".join([lines[0], json.dumps(changed), lines[2]]) + "\n")
    red = run_pytest(tmp_path)
    assert red.returncode == 1
    assert "1 failed, 2 passed" in red.stdout
    assert "loss_cases-p001" in red.stdout
    assert target.read_text().count("\n") == 3


def test_a_file_of_no_known_kind_fails(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('[{"surprise": 1}]')
    (case,) = golden_support.load(tmp_path)
    with pytest.raises(AssertionError, match="a case of no known kind"):
        golden_support.check(case)


def test_an_empty_file_fails_beside_full_ones(tmp_path: Path) -> None:
    own = Path(__file__).parent / "data" / "golden" / "spike_detection.json"
    (tmp_path / "spike_detection.json").write_text(own.read_text())
    (tmp_path / "loss_cases.jsonl").write_text("")
    empty = [c for c in golden_support.load(tmp_path) if c.kind == "empty"]
    assert [c.id for c in empty] == ["loss_cases-no-cases"]


def test_every_kind_is_among_our_own_cases() -> None:
    cases = golden_support.load(Path(__file__).parent / "data" / "golden")
    counts = {kind: sum(c.kind == kind for c in cases) for kind in {c.kind for c in cases}}
    assert counts == {
        "loss": 105,
        "spike": 6,
        "expand": 3,
        "pack": 3,
        "split": 10,
        "balance": 10,
    }
