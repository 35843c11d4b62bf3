"""What the documents say of the zoo is what was measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from replay_lib.case import Case, builtin_cases
from replay_lib.run import RECORDED_METHODS
from replay_lib.snapshot import open_snapshot
from replay_lib.zoo import KINDS

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/zoo.json").read_text())
ROWS = {(row["kind"], row["seed"]): row for row in RESULTS["rows"]}
EMBEDDED = sorted(p.name for p in builtin_cases().glob("zoo-*"))


def table_module():
    spec = importlib.util.spec_from_file_location("zoo_table", ROOT / "benchmarks/zoo_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_rendered_from_the_results():
    module = table_module()
    text = (ROOT / "docs/zoo.md").read_text()
    assert module.render(RESULTS) in text


def test_every_kind_was_run_with_the_first_seed():
    assert {kind for kind, seed in ROWS if seed == RESULTS["seeds"][0]} == set(KINDS)


def test_at_least_three_wrong_inputs_spike_with_no_seed_and_ten_kinds_with_some():
    spiked = {kind for (kind, _), row in ROWS.items() if row["event"] == "spike"}
    assert len([k for k in KINDS.values() if not k.spikes and k.name not in spiked]) >= 3
    assert len([k for k in KINDS.values() if k.spikes and k.name in spiked]) >= 10


def test_every_spike_replayed_to_its_norm_and_has_figures_for_every_method():
    for key, row in ROWS.items():
        if row["event"] == "spike":
            assert row["replayed_norm"] == row["norm"], key  # made and replayed on one machine
            assert set(RECORDED_METHODS) < set(row["methods"]), key


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_case_is_a_row_of_the_table(name):
    case = Case.load(builtin_cases() / name)
    row = ROWS[name.removeprefix("zoo-"), case.provenance.seed]
    snapshot = open_snapshot(case.snapshot)
    assert snapshot.grad_norm_preclip == row["norm"] and snapshot.grad_norm_median == row["median"]
    told = {m: f["verdict"] for m, f in row["methods"].items() if m in case.expected}
    # the table has the recorded methods; what others do was pinned from replays of the case
    assert set(RECORDED_METHODS) <= set(told)
    assert all(verdict in case.expected[m].verdicts for m, verdict in told.items())
    earlier = RESULTS["seeds"][: RESULTS["seeds"].index(row["seed"])]
    assert all(ROWS[row["kind"], seed]["event"] != "spike" for seed in earlier)
    assert case.quiet is not None
    assert abs(open_snapshot(case.quiet).spike_ratio_recorded - 1) <= 0.1


def test_the_embedded_cases_are_small():
    files = [p for name in EMBEDDED for p in (builtin_cases() / name).rglob("*") if p.is_file()]
    assert len(EMBEDDED) >= 5 and sum(p.stat().st_size for p in files) < 25e6
