"""Results, snapshots and methods as a terminal or a JSON reader sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from replay_lib.engine.protocol import Difference
from replay_lib.record.result import Result, quiet_faults
from replay_lib.record.table import by_case, reproduction_table, rich_table
from replay_lib.run import Replayed


def replayed_document(replayed: Replayed, seconds: float) -> dict[str, Any]:
    """The JSON document of ``replay``, ``sweep`` and ``demo``."""
    return {
        "results": [result.as_json() for result in replayed.results],
        "refused": [
            {
                "case": one.case,
                "experiment": one.experiment,
                "code": one.error.code,
                "message": str(one.error),
            }
            for one in replayed.refused
        ],
        "exit_code": replayed.exit_code,
        "seconds": round(seconds, 3),
    }


def print_replayed(replayed: Replayed, console: Console) -> None:
    """Recorded against replayed norms, a table of verdicts a case, and every reason."""
    results = replayed.results
    console.print(reproduction_table(results), markup=False)
    for line, group in by_case(results):
        console.print(f"\n{line}", style="bold", markup=False)
        console.print(rich_table(group))
        for result in group:
            console.print(f"- {result.explain()}", markup=False, soft_wrap=True)
    for told in quiet_faults(results):
        console.print(told, style="bold red", markup=False, soft_wrap=True)
    for one in replayed.refused:
        text = f"refused: {one.case} / {one.experiment}: {one.error}"
        console.print(text, style="red", markup=False, soft_wrap=True)
    for note in _notes(results):
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _notes(results: Sequence[Result]) -> list[str]:
    """What a reader of the table has to know, each once."""
    notes = [note for result in results for note in result.notes]
    for case in dict.fromkeys(r.case for r in results if r.evidence == "mechanism"):
        notes.append(
            f"{case}: its median was invented, so ratio and verdicts show the mechanism, "
            f"not a method's worth"
        )
    for result in results:
        if not result.deterministic:
            notes.append(f"{result.case}: two replays of the baseline were not bit-equal")
    return list(dict.fromkeys(notes))


def snapshot_values(described: Mapping[str, Any]) -> dict[str, Any]:
    """What ``show`` prints, one line a topic."""
    apart = ("worker", "files", "ranks", "bytes", "model_differences", "refused")
    values = {k: v for k, v in described.items() if k not in apart}
    for name in ("spike_settings", "parallel"):
        values[name] = _joined(described[name])
    worker = described["worker"]
    values["worker"] = _joined({k: v for k, v in worker.items() if v not in (None, "", [], ())})
    for rank in described["ranks"]:
        files = [rank[kind] for kind in ("batch", "routing", "grad_info") if rank[kind]]
        values[f"dp rank {rank['dp_rank']}"] = (
            f"global rank {rank['global_rank']}, {rank['routing_payloads']} routing payloads: "
            f"{', '.join(files)}"
        )
    provenance = described["provenance"]
    values["provenance"] = _joined(provenance) if provenance else None
    values |= _model_values(described["model_differences"])
    if described["refused"]:
        values["replay refuses"] = "; ".join(described["refused"])
    values["files"] = f"{len(described['files'])}, {described['bytes'] / 1e6:.1f} MB"
    return values


def _model_values(differences: Any) -> dict[str, Any]:
    """Differences of the model: a line for each that matters, one for all that do not."""
    if isinstance(differences, str):
        return {}  # told as what the replay refuses
    found = [Difference.model_validate(d) for d in differences]
    lines: dict[str, list[str]] = {f"model ({d.kind})": [] for d in found if d.matters}
    for one in found:
        if one.matters:
            lines[f"model ({one.kind})"].append(one.told())
    harmless = [d.field for d in found if not d.matters]
    told: dict[str, Any] = {kind: "; ".join(texts) for kind, texts in lines.items()}
    if harmless:
        told["model (same step)"] = f"set otherwise here: {', '.join(harmless)}"
    return told


def _joined(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def methods_table(described: Sequence[Mapping[str, Any]]) -> Table:
    """Slug, family, seams, status and summary of every method."""
    table = Table(header_style="bold")
    for name in ("slug", "family", "seams", "status", "parameters", "summary"):
        table.add_column(name, overflow="fold", no_wrap=name == "slug")
    for method in described:
        table.add_row(
            method["slug"],
            method["family"],
            ", ".join(method["seams"]),
            method["standing"] or method["status"],
            _joined(method["parameters"]) or "-",
            method["summary"],
        )
    return table
