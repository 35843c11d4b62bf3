"""A guard's findings as lines for a terminal, Markdown for a pull request, JUnit and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tabulate import tabulate

from replay_lib.guard.compare import Change, Pair, follows_baseline
from replay_lib.guard.guarding import Guarded
from replay_lib.record.result import Result
from replay_lib.writing import replace_file


def counted(guarded: Guarded) -> str:
    """One line: how many experiments of how many cases, and how many changed."""
    cases = len({p.case for p in guarded.pairs})
    changes = guarded.changes
    worse = sum(c.worse for c in changes)
    told = (
        f"{len(changes)} changed, {worse} of them for the worse" if changes else "nothing changed"
    )
    return (
        f"{guarded.trainer} against {guarded.reference}: {len(guarded.pairs)} experiments of "
        f"{cases} {'case' if cases == 1 else 'cases'}, {told}"
    )


def lines(guarded: Guarded) -> list[str]:
    """What changed, one experiment a line, then the count."""
    told = [
        f"{'WORSE  ' if worse else 'changed'} {case} / {experiment}: {words}"
        for worse, case, experiment, words in _rows(guarded)
    ]
    return [*guarded.faults, *told, counted(guarded)]


def _rows(guarded: Guarded) -> list[tuple[bool, str, str, str]]:
    """(worse, case, experiment, words) of what changed; what follows a baseline in one row."""
    changes = guarded.changes
    rows: list[tuple[bool, str, str, str]] = []
    for case in dict.fromkeys(c.pair.case for c in changes):
        mine = [c for c in changes if c.pair.case == case]
        behind = [c for c in mine if follows_baseline(c, changes)]
        rows += [(c.worse, case, c.pair.experiment, c.told) for c in mine if c not in behind]
        if behind:
            rows.append((True, case, f"{len(behind)} methods", "as the baseline"))
    return rows


def markdown(guarded: Guarded) -> str:
    """A summary for a pull request: the count, then a table of what changed."""
    parts = ["### Replayed gradient spikes", "", counted(guarded) + "."]
    rows = _rows(guarded)
    if rows:
        cells = [["worse" if worse else "changed", *rest] for worse, *rest in rows]
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in cells]
        headers = ["", "case", "experiment", "what changed"]
        parts += ["", tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)]
    parts += [f"\n> {fault}" for fault in guarded.faults]
    return "\n".join(parts) + "\n"


def junit(guarded: Guarded) -> bytes:
    """JUnit XML: a test for each experiment, a failure where it became worse."""
    changed = {(c.pair.case, c.pair.experiment): c for c in guarded.changes}
    suite = ElementTree.Element(
        "testsuite",
        name="spike-replay guard",
        tests=str(len(guarded.pairs)),
        failures=str(sum(c.worse for c in changed.values())),
    )
    for pair in guarded.pairs:
        seconds = pair.tested.seconds if isinstance(pair.tested, Result) else 0.0
        test = ElementTree.SubElement(
            suite, "testcase", classname=pair.case, name=pair.experiment, time=f"{seconds:.3f}"
        )
        change = changed.get((pair.case, pair.experiment))
        if change is not None:
            kind = "failure" if change.worse else "system-out"
            said = ElementTree.SubElement(test, kind)
            said.text = change.told
            if change.worse:
                said.set("message", change.words[0])
        elif not isinstance(pair.tested, Result):
            ElementTree.SubElement(test, "skipped", message=str(pair.tested))
    document = ElementTree.Element("testsuites")
    document.append(suite)
    ElementTree.indent(document)
    text: bytes = ElementTree.tostring(document, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def documents(guarded: Guarded) -> list[dict[str, Any]]:
    """One plain document an experiment, of strict JSON; what did not change is in it too."""
    changed = {(c.pair.case, c.pair.experiment): c for c in guarded.changes}
    return [
        _document(pair, changed.get((pair.case, pair.experiment)))
        | {
            "trainer": guarded.trainer,
            "against": guarded.reference,
        }
        for pair in guarded.pairs
    ]


def write_reports(
    guarded: Guarded,
    *,
    junit_file: Path | None,
    json_lines: Path | None,
    summary: Path | None,
) -> None:
    """Write the files that were asked for, each whole."""
    if junit_file is not None:
        replace_file(junit_file, junit(guarded))
    if json_lines is not None:
        text = "".join(json.dumps(d, allow_nan=False) + "\n" for d in documents(guarded))
        replace_file(json_lines, text.encode())
    if summary is not None:
        replace_file(summary, markdown(guarded).encode())


def _word(change: Change) -> str:
    return "worse" if change.worse else "changed"


def _document(pair: Pair, change: Change | None) -> dict[str, Any]:
    moved = pair.difference
    return {
        "case": pair.case,
        "experiment": pair.experiment,
        "change": None if change is None else _word(change),
        "words": [] if change is None else list(change.words),
        "bit_equal": pair.bit_equal,
        "cosine": None if moved is None else moved.cosine,
        "reference": _side(pair.reference),
        "tested": _side(pair.tested),
    }


def _side(found: Result | Exception) -> dict[str, Any]:
    if isinstance(found, Result):
        plain = found.as_json()
        return {k: plain[k] for k in ("verdict", "grad_norm_preclip", "ratio", "reason")}
    return {"error": getattr(found, "code", "error"), "message": str(found)}
