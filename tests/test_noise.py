"""How far norms move by arithmetic alone: the table, its reasons, and repeats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from replay_lib.noise import NOISE, noise_of, spread


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([8.0, 8.0], 0.0),
        ([1.0, 1.5, 1.0], 0.5),
        ([4.0, 1.0, 2.0, 2.0], 1.5),
        ([0.0, 0.0], 0.0),
        ([0.0, 0.0, 1.0], math.nan),
        ([1.0, math.inf], math.nan),
        ([math.nan], math.nan),
        ([], math.nan),
    ],
)
def test_spread_of_repeated_norms(norms: list[float], expected: float) -> None:
    assert spread(norms) == pytest.approx(expected, nan_ok=True)


def test_the_noise_table_covers_what_was_measured() -> None:
    files = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("devices-*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    assert len(rows) >= 6
    for row in rows:
        entry = noise_of(row["precision"], row["device"])
        measured = max(row["relative_to_recorded"], *row["relative_to_cpu"].values())
        assert measured <= entry.relative, row["device"]
        assert _shown(row["relative_to_recorded"]) in entry.reason, row["device"]


def test_the_noise_table_covers_what_two_devices_differ_by() -> None:
    results = Path(__file__).parents[1] / "benchmarks/results"
    rows = json.loads((results / "repeats-h200.json").read_text())["rows"]
    widest: dict[str, float] = {}
    for row in rows:
        alike = [r["norm"] for r in rows if (r["case"], r["precision"]) == _step(row)]
        apart = (max(alike) - min(alike)) / min(alike)
        widest[row["precision"]] = max(apart, widest.get(row["precision"], 0.0))
        assert row["spread"] <= noise_of(row["precision"], row["device"]).relative
    for precision, apart in widest.items():
        entry = noise_of(precision, "cuda")
        assert 0 < apart <= entry.relative
        assert _shown(apart) in entry.reason


def test_the_noise_table_covers_what_layouts_differ_by() -> None:
    results = Path(__file__).parents[1] / "benchmarks/results"
    for file in ("layouts-h200.json", "layouts-cpu.json"):
        rows = json.loads((results / file).read_text())["rows"]
        for row in rows:
            entry = noise_of(row["precision"], row["device"])
            moved = max(row["seams_off_one_rank"].values())
            assert moved <= entry.relative, (file, row["recorded_on"], row["replayed_on"])
            if row["precision"] == "float32":
                assert row["off_recorded"] <= entry.relative


def _step(row: dict[str, Any]) -> tuple[str, str]:
    return row["case"], row["precision"]


def _shown(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def test_every_noise_entry_has_a_reason_and_the_unknown_gets_the_widest() -> None:
    assert all(entry.reason and entry.relative > 0 for entry in NOISE.values())
    assert noise_of("float32", "cuda:0") is NOISE["float32", "cuda"]
    unknown = noise_of("float16", "xpu")
    assert unknown.relative == max(entry.relative for entry in NOISE.values())
    assert unknown.reason == "float16 on xpu was not measured: the widest entry of the table"
