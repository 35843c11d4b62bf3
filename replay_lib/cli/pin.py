"""``spike-replay pin``: verdicts as they fall, into ``case.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from replay_lib.cli.arguments import Device, Json, Mitigations, as_path
from replay_lib.cli.output import print_error, print_json, progress, stdout
from replay_lib.exit_codes import ExitCode
from replay_lib.pin import Pinned, Wish
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
    widen: Annotated[
        str | None,
        typer.Option(
            metavar="REASON", help="Where another verdict is stated, expect both, for this reason."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite verdicts that are right elsewhere, too.")
    ] = False,
    json: Json = False,
) -> None:
    """Replay METHODS on CASE and write their verdicts into its case.yaml, as they fall."""
    options = ReplayOptions(device=device, mitigations=tuple(mitigations or ()))
    with progress() as tell:
        pinned = pin_case(
            case,
            methods or [],
            options,
            tell,
            write=not dry_run,
            wish=Wish(widen=widen, replace=replace),
        )
    if json:
        print_json(_document(pinned))
    else:
        stdout().print(_table(pinned))
        for refusal in pinned.refused:
            print_error(refusal.error.code, str(refusal.error), as_json=False)
        for line in _held(pinned, case):
            stdout().print(line, soft_wrap=True)
        stdout().print("\n".join(filter(None, [pinned.left_out, _said(pinned, dry_run)])))
    raise typer.Exit(_exit_code(pinned))


def _exit_code(pinned: Pinned) -> int:
    if pinned.refused:
        return pinned.refused[0].error.exit_code
    return ExitCode.RED if pinned.held else ExitCode.GREEN


def _held(pinned: Pinned, case: Path) -> list[str]:
    """Which verdicts stayed as they were, why, and both ways to go on."""
    if not pinned.held:
        return []
    names = " ".join(one.experiment for one in pinned.held)
    lines = [
        f"{pinned.case}: {one.experiment}: {one.now} here, but {one.held}: kept"
        for one in pinned.held
    ]
    then = (
        f"to expect both: spike-replay pin {case} {names} --widen REASON; to overwrite: --replace"
    )
    return [*lines, f"{pinned.case}: {then}"]


def _said(pinned: Pinned, dry_run: bool) -> str:
    if pinned.written:
        return f"{pinned.case}: case.yaml was written"
    return f"{pinned.case}: {'nothing written (--dry-run)' if dry_run else 'nothing to write'}"


def _table(pinned: Pinned) -> Table:
    titles = ("experiment", "before", "now", "change", "reason")
    table = Table(*titles, box=None, pad_edge=False)
    for one in pinned.changes:
        table.add_row(one.experiment, str(one.before or "-"), one.now, one.word, one.reason)
    return table


def _document(pinned: Pinned) -> dict[str, Any]:
    return {
        "case": pinned.case,
        "written": pinned.written,
        "left_out": pinned.left_out or None,
        "expected": [
            {
                "experiment": one.experiment,
                "before": one.before.plain() if one.before else None,
                "now": one.now,
                "after": one.after.plain(),
                "change": one.word,
                "held": one.held,
                "reason": one.reason,
            }
            for one in pinned.changes
        ],
        "refused": [
            {"experiment": r.experiment, "code": r.error.code, "message": str(r.error)}
            for r in pinned.refused
        ],
    }
