"""``spike-replay pin``: verdicts as they fall, into ``case.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from replay_lib.cli.arguments import Device, Json, Mitigations, as_path
from replay_lib.cli.output import print_error, print_json, progress, stdout
from replay_lib.exit_codes import ExitCode
from replay_lib.pin import Pinned
from replay_lib.pin import pin as pin_case
from replay_lib.run import ReplayOptions


def pin(
    case: Annotated[Path, typer.Argument(parser=as_path, help="A case directory.")],
    methods: Annotated[
        list[str] | None,
        typer.Argument(help="Methods to pin; none given: all registered and expected ones."),
    ] = None,
    *,
    device: Device = "auto",
    mitigations: Mitigations = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change and write nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Replay METHODS on CASE and write their verdicts into its case.yaml, as they fall."""
    options = ReplayOptions(device=device, mitigations=tuple(mitigations or ()))
    with progress() as tell:
        pinned = pin_case(case, methods or [], options, tell, write=not dry_run)
    if json:
        print_json(_document(pinned))
    else:
        stdout().print(_table(pinned))
        for refusal in pinned.refused:
            print_error(refusal.error.code, str(refusal.error), as_json=False)
        stdout().print(_said(pinned, dry_run))
    raise typer.Exit(pinned.refused[0].error.exit_code if pinned.refused else ExitCode.GREEN)


def _said(pinned: Pinned, dry_run: bool) -> str:
    if pinned.written:
        return f"{pinned.case}: case.yaml was written"
    return f"{pinned.case}: {'nothing written (--dry-run)' if dry_run else 'nothing to write'}"


def _table(pinned: Pinned) -> Table:
    table = Table("experiment", "before", "now", "change", "reason", box=None, pad_edge=False)
    for one in pinned.changes:
        table.add_row(one.experiment, one.before or "-", one.after, one.word, one.reason)
    return table


def _document(pinned: Pinned) -> dict[str, Any]:
    return {
        "case": pinned.case,
        "written": pinned.written,
        "expected": [
            {
                "experiment": one.experiment,
                "before": one.before,
                "after": one.after,
                "change": one.word,
                "reason": one.reason,
            }
            for one in pinned.changes
        ],
        "refused": [
            {"experiment": r.experiment, "code": r.error.code, "message": str(r.error)}
            for r in pinned.refused
        ],
    }
