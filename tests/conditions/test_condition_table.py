"""Every row of docs/conditions.md has a mutator and a test, and the other way round."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mutate

from replay_lib.analysis import CODES

HERE = Path(__file__).parent
DOCUMENT = (HERE.parents[1] / "docs/conditions.md").read_text()
TABLE = DOCUMENT.split("Not shown yet")[0]
ROWS = {
    cells[0].strip(): cells
    for line in TABLE.splitlines()
    if re.match(r"\| [A-E]\d+ \|", line) and (cells := line.strip("|").split(" | "))
}


def named_tests() -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for file in HERE.glob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r"test_[a-e]\d+_", node.name):
                found[node.name] = node
    return found


def used() -> set[str]:
    """Names of mutators that a test calls, in its own process or in the one it starts."""
    files = [*HERE.glob("test_*.py"), HERE.parent / "many_snapshots.py"]
    text = "\n".join(file.read_text() for file in files)
    return set(re.findall(r"mutate(?:_files|_values)?\.(\w+)", text))


def test_all_rows_are_there() -> None:
    numbers = {"A": "1 3 4 5 6 7 10 11 12 13 15 18", "B": "1 3 6 7 11"}
    numbers |= {"C": "1 4 9 11 13 15 17", "D": "1 2 3 10", "E": "1 6 8 9 10 11 15 18 19"}
    assert set(ROWS) == {f"{letter}{n}" for letter, all_ in numbers.items() for n in all_.split()}


def test_every_row_has_a_mutator_that_a_test_uses() -> None:
    for row in ROWS:
        mutators = mutate.of(row)
        assert mutators, row
        assert {m.__name__ for m in mutators} <= used(), row
    assert set(mutate.MUTATORS) == set(ROWS)


def test_every_test_is_in_its_row_and_every_named_test_exists() -> None:
    named = {row: set(re.findall(r"`(test_\w+)`", cells[3])) for row, cells in ROWS.items()}
    known = set(named_tests())
    for row, names in named.items():
        assert names, row
        own = {name for name in known if name.startswith(f"test_{row.lower()}_")}
        assert names == own, row
    assert set().union(*named.values()) == known


def test_every_code_that_it_names_exists() -> None:
    verdicts = {"reference_missing", "ratio_undefined", "non_finite", "reproduced"}
    keys = {
        "grad_norm_preclip",
        "postclip_norm",
        "clip_coefficient",
        "quiet_norm_change",
        "quiet_cosine",
    }
    for row, cells in ROWS.items():
        named = set(re.findall(r"`([\w-]+)`", cells[2])) - verdicts - keys
        assert named <= set(CODES), row
