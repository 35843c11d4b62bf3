"""The tables, as they are shown."""

from __future__ import annotations

import io

from make_results import some_results
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from replay_lib.record.table import COLUMNS, plain_table, reproduction_table, rich_table


def test_plain_table(snapshot: SnapshotAssertion) -> None:
    assert plain_table(some_results()) == snapshot


def test_document_table(snapshot: SnapshotAssertion) -> None:
    assert plain_table(some_results(), "github") == snapshot


def test_reproduction_table(snapshot: SnapshotAssertion) -> None:
    assert reproduction_table(some_results()) == snapshot


def test_both_tables_show_the_same_cells() -> None:
    out = io.StringIO()
    Console(file=out, width=400).print(rich_table(some_results(), "title"))
    shown = out.getvalue()
    for result in some_results():
        for _, cell in COLUMNS:
            assert cell(result) in shown


def test_a_reduced_replay_says_so_in_every_table() -> None:
    reduced = [r for r in some_results() if r.fidelity == "reduced"]
    assert "not full-fidelity" in plain_table(reduced)
