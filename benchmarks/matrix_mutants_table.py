"""The part of ``docs/mutation.md`` on the suite of spikes, from ``matrix_mutants.json``.

    python benchmarks/matrix_mutants_table.py     # rewrite the part between the marks

Kinds and reasons are written by hand into the last columns and kept; a survivor without one shows
up as ``(no reason yet)``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/matrix_mutants.json"
DOCS = ROOT / "docs/mutation.md"
BEGIN = "<!-- tables: python benchmarks/matrix_mutants_table.py -->"
END = "<!-- end of tables of the suite -->"
NO_REASON = "(no reason yet)"
#: Why a mutant survives: ``same``: the program does the same on every input; ``check``: it refuses
#: less, or other things, and the two cases are sound; ``told``: a digest, a count or a note is
#: another, and no norm; ``unused``: the two cases under all methods never get to where it differs.
KINDS = ("same", "check", "told", "unused")

Row = Mapping[str, Any]
Key = tuple[str, str, str]  # module, what stood there, what the mutant says


def render(document: Row, reasons: Mapping[Key, tuple[str, str]]) -> str:
    """Counts by module, what was red, and every survivor with kind and reason."""
    parts = [_counts(document), _told(document, reasons), _survivors(document, reasons)]
    return "\n\n".join([BEGIN, *parts, END])


def noticed(rows: Sequence[Row]) -> int:
    """Mutants that turned the suite red, or kept it from starting or ending."""
    return sum(row["outcome"] in ("killed", "broken", "timeout") for row in rows)


def _counts(document: Row) -> str:
    drawn = document["mutants"]
    names = list(document["pool"])
    lines = [_line(name.removeprefix("replay_lib/"), [name], document, drawn) for name in names]
    lines.append(_line("all", names, document, drawn))
    heads = ["module", "mutants", "on lines reached", "drawn of these", "run", "noticed"]
    return tabulate(lines, heads, "github", disable_numparse=True)


def _line(title: str, names: list[str], document: Row, drawn: list[Row]) -> list[str]:
    own = [r for r in drawn if r["module"] in names and r["outcome"] != "unreached"]
    pool = [document["pool"][name] for name in names]
    figures = [sum(p["mutants"] for p in pool), sum(p["reached"] for p in pool), len(own)]
    figures += [sum(r["outcome"] is not None for r in own), noticed(own)]
    return [f"`{title}`" if title != "all" else title, *map(str, figures)]


def _told(document: Row, reasons: Mapping[Key, tuple[str, str]]) -> str:
    run = [r for r in document["mutants"] if r["outcome"] not in (None, "unreached")]
    unreached = sum(r["outcome"] == "unreached" for r in document["mutants"])
    first = Counter(str(r["red"]).partition("[")[0] for r in run if r["outcome"] == "killed")
    kinds = Counter(reasons.get(key(r), (NO_REASON,))[0] for r in survivors(document))
    same, dead = kinds["same"], noticed(run)
    told = ", ".join(f"{n} `{name}`" for name, n in first.most_common())
    left = ", ".join(f"{n} `{name}`" for name, n in kinds.most_common()) or "none"
    return (
        f"{len(run)} of {len(document['mutants']) - unreached} were run; {unreached} more were "
        "drawn on lines that are not reached. "
        f"{dead} of {len(run)} were noticed ({dead / len(run):.0%}), {dead} of "
        f"{len(run) - same} that are not the same program ({dead / (len(run) - same):.0%}). "
        f"The first red test: {told}. Survivors by kind: {left}."
    )


def survivors(document: Row) -> list[Row]:
    """In the order of modules and lines."""
    found = [r for r in document["mutants"] if r["outcome"] == "survived"]
    return sorted(found, key=lambda r: (list(document["pool"]).index(r["module"]), r["line"]))


def _survivors(document: Row, reasons: Mapping[Key, tuple[str, str]]) -> str:
    lines = []
    for row in survivors(document):
        short, before, after = key(row)
        kind, why = reasons.get(key(row), (NO_REASON, NO_REASON))
        lines.append([f"`{short}` {row['where']}", before, after, kind, why])
    heads = ["where", "written", "mutant", "kind", "why nothing turns red"]
    return tabulate(lines, heads, "github", disable_numparse=True)


def key(row: Row) -> Key:
    """How a survivor is named in the table."""
    short = row["module"].removeprefix("replay_lib/")
    return short, _code(row["before"]), _code(row["after"])


def _code(text: str) -> str:
    return "(removed)" if not text else "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def reasons_in(text: str) -> dict[Key, tuple[str, str]]:
    """Kinds and reasons that the document's table of survivors holds already."""
    found: dict[Key, tuple[str, str]] = {}
    for line in text.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [c.strip() for c in line.replace("\\|", "\0").strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`") and cells[3] in KINDS:
            before, after, kind, why = (c.replace("\0", "\\|") for c in cells[1:])
            found[(cells[0].split("`")[1], before, after)] = (kind, why)
    return found


def main() -> None:
    """Rewrite the part of the document."""
    text = DOCS.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    DOCS.write_text(head + render(document, reasons_in(text)) + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
