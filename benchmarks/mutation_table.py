"""The tables of ``docs/mutation.md``, rendered from ``benchmarks/results/mutation.json``.

    python benchmarks/mutation_table.py     # rewrite the part between the marks

Reasons are written by hand into the last column and kept; a survivor without one shows up as
``(no reason yet)``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/mutation.json"
DOCS = ROOT / "docs/mutation.md"
BEGIN = "<!-- tables: python benchmarks/mutation_table.py -->"
END = "<!-- end of tables -->"
NO_REASON = "(no reason yet)"

Key = tuple[str, str, str]  # module, what stood there, what the mutant says


def render(document: Mapping[str, Any], reasons: Mapping[Key, str]) -> str:
    """Counts by module, then every survivor with its reason."""
    return f"{BEGIN}\n\n{_counts(document)}\n\n{_survivors(document, reasons)}\n\n{END}"


def killed(row: Mapping[str, Any]) -> int:
    """Mutants that were noticed: by a failing test, by nothing that starts, or by a hang."""
    return int(row["killed"] + row["broken"] + row["timeout"])


def _counts(document: Mapping[str, Any]) -> str:
    rows = document["modules"]
    lines = [
        _line(f"`{module.removeprefix('replay_lib/')}`", [row]) for module, row in rows.items()
    ]
    heads = [
        "module",
        "mutants",
        "tried",
        "killed",
        "of which at import",
        "survived",
        "killed, share",
    ]
    lines.append(_line("all", list(rows.values())))
    return tabulate(lines, heads, "github", disable_numparse=True)


def _line(name: str, rows: list[Mapping[str, Any]]) -> list[str]:
    tried, dead = sum(r["tried"] for r in rows), sum(killed(r) for r in rows)
    figures = [sum(r["mutants"] for r in rows), tried, dead, sum(r["broken"] for r in rows)]
    return [name, *map(str, figures), str(tried - dead), f"{dead / tried:.0%}"]


def _survivors(document: Mapping[str, Any], reasons: Mapping[Key, str]) -> str:
    lines = [
        [f"`{short}` {one['where']}", _code(one["before"]), _code(one["after"]), reasons.get(key)]
        for module, row in document["modules"].items()
        for one in row["survivors"]
        for short in [module.removeprefix("replay_lib/")]
        for key in [(short, _code(one["before"]), _code(one["after"]))]
    ]
    told = [[*line[:3], line[3] or NO_REASON] for line in lines]
    return tabulate(told, ["where", "written", "mutant", "why nothing turns red"], "github")


def _code(text: str) -> str:
    return "(removed)" if not text else "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def reasons_in(text: str) -> dict[Key, str]:
    """The reasons that the document's table of survivors holds already."""
    found: dict[Key, str] = {}
    for line in text.splitlines():
        cells = [c.strip() for c in line.replace("\\|", "\0").strip("|").split("|")]
        if len(cells) == 4 and cells[1].startswith("`") and cells[3] != NO_REASON:
            module = cells[0].split("`")[1]
            before, after = (c.replace("\0", "\\|") for c in cells[1:3])
            found[(module, before, after)] = cells[3].replace("\0", "\\|")
    return found


def main() -> None:
    """Rewrite the tables of the document."""
    text = DOCS.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    tables = render(document, reasons_in(text))
    DOCS.write_text(head + tables + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
