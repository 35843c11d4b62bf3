"""The tables of ``docs/zoo.md``, rendered from ``benchmarks/results/zoo.json``.

python benchmarks/zoo_table.py      # rewrite the part between the marks
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/zoo.json"
DOCS = ROOT / "docs/zoo.md"
BEGIN, END = "<!-- tables: python benchmarks/zoo_table.py -->", "<!-- end of tables -->"

SHORT = {
    "enable-token-mismatch-tis-max2": "TIS 2",
    "use-current-routing-for-first-moe-layer": "first layer current",
    "replay-r3-on-loss-tokens-only": "loss tokens only",
    "balance-negative-advantages": "balance",
    "disable-routing-replay": "routing off",
    "use-current-routing-for-first-moe-layer+enable-token-mismatch-tis-max2": (
        "first layer current + TIS 2"
    ),
}


def render(document: dict[str, Any]) -> str:
    """Norms by kind and seed, then what every method does to every spike."""
    return f"{BEGIN}\n\n{_norms(document)}\n\n{_methods(document)}\n\n{END}"


def _norms(document: dict[str, Any]) -> str:
    seeds = document["seeds"]
    by = {(row["kind"], row["seed"]): row for row in document["rows"]}
    kinds = list(dict.fromkeys(row["kind"] for row in document["rows"]))
    lines = [[kind, *(_ratio(by.get((kind, seed))) for seed in seeds)] for kind in kinds]
    return tabulate(
        lines, ["norm / median", *(f"seed {s}" for s in seeds)], "github", disable_numparse=True
    )


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    shown = "undefined" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"**{shown}**" if row["event"] == "spike" else shown


def _methods(document: dict[str, Any]) -> str:
    rows = [r for r in document["rows"] if r["event"] == "spike" and "methods" in r]
    lines = [
        [row["kind"], str(row["seed"]), SHORT[name], *_cells(figures)]
        for row in rows
        for name, figures in row["methods"].items()
    ]
    heads = ["kind", "seed", "method", "ratio (stored / carried)", "reduction", "retained"]
    return tabulate(lines, [*heads, "verdict"], "github", disable_numparse=True)


def _cells(figures: dict[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        values = figures[name]
        return " / ".join(form.format(values[o]) for o in ("stored", "carried") if o in values)

    told = dict.fromkeys([figures["verdict"], *figures["flags"]])
    cells = [shown("ratio", "{:.2f}"), shown("reduction", "{:.0%}"), shown("retained", "{:.0%}")]
    return [*cells, ", ".join(told)]


def main() -> None:
    """Rewrite the tables of the document."""
    text = DOCS.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    DOCS.write_text(head + render(document) + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
