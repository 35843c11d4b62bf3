"""The published results of faults planted under the suite of spikes, and what is told of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    request.addfinalizer(lambda: sys.path.remove(str(ROOT / "benchmarks")))
    import matrix_mutants_table

    return matrix_mutants_table


@pytest.fixture(scope="module")
def document(table: Any) -> Any:
    return json.loads(table.RESULTS.read_text(encoding="utf-8"))


def test_sixty_are_drawn_of_lines_that_the_suite_gets_to(document: Any) -> None:
    reached = [row for row in document["mutants"] if row["outcome"] != "unreached"]
    assert len(reached) == 60
    assert document["mutants"][-1] in reached  # none is drawn beyond the sixtieth
    assert {row["module"] for row in reached} <= set(document["pool"])
    for case in document["cases"]:
        assert (ROOT / "spike_cases" / case / "case.yaml").is_file()


def test_what_is_left_out_of_the_pool_is_there_and_is_left_out(document: Any) -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in document["pool"])
    left_out = [name for names in document["left_out"].values() for name in names.split()]
    assert left_out
    for name in left_out:
        assert re.search(rf"(def {name}\(|class {name}\(|^{name} = )", text, re.MULTILINE), name
    assert not {row["where"] for row in document["mutants"]} & set(left_out)


def test_what_is_red_is_red_in_a_test_of_the_two_cases(document: Any) -> None:
    killed = [row for row in document["mutants"] if row["outcome"] == "killed"]
    assert killed
    for row in killed:
        name, _, where = row["red"].partition("[")
        assert name.startswith("test_"), row
        assert where.startswith(tuple(document["cases"])), row


def test_the_document_holds_the_tables_and_a_reason_for_each_survivor(
    table: Any, document: Any
) -> None:
    text = table.DOCS.read_text(encoding="utf-8")
    reasons = table.reasons_in(text)
    assert table.render(document, reasons) in text
    assert {table.key(row) for row in table.survivors(document)} == set(reasons)
    assert {kind for kind, _ in reasons.values()} <= set(table.KINDS)


def test_a_survivor_without_a_reason_shows(table: Any, document: Any) -> None:
    told = table.render(document, {})
    assert told.count(table.NO_REASON) >= 2 * len(table.survivors(document)) > 0
