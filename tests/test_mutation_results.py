"""The published mutation results: enough mutants noticed, a reason for each that was not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    request.addfinalizer(lambda: sys.path.remove(str(ROOT / "benchmarks")))
    import mutation_table

    return mutation_table


@pytest.fixture(scope="module")
def rows(table) -> dict[str, dict]:
    return json.loads(table.RESULTS.read_text(encoding="utf-8"))["modules"]


def test_nine_mutants_in_ten_are_noticed(table, rows) -> None:
    tried = sum(row["tried"] for row in rows.values())
    assert tried == sum(row["mutants"] for row in rows.values()) > 1000
    assert sum(table.killed(row) for row in rows.values()) >= 0.9 * tried
    for row in rows.values():
        assert row["tried"] == table.killed(row) + row["survived"] <= row["mutants"]
        assert row["survived"] == len(row["survivors"])


def test_every_part_that_is_pure_code_was_measured(rows) -> None:
    parts = {f"replay_lib/{name}.py" for name in ("routing", "microbatch", "detect", "rule")}
    parts |= {"replay_lib/verdict.py"}
    loss = (path.relative_to(ROOT) for path in (ROOT / "replay_lib/loss").glob("*.py"))
    assert set(rows) == parts | {str(path) for path in loss if path.name != "__init__.py"}


def test_the_document_holds_the_tables_and_a_reason_for_each_survivor(table) -> None:
    text = table.DOCS.read_text(encoding="utf-8")
    document = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    tables = table.render(document, table.reasons_in(text))
    assert tables in text
    assert table.NO_REASON not in tables
