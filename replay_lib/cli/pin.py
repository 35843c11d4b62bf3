"""``spike-replay pin``: verdicts as they fall, into ``case.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from replay_lib.case import Case
from replay_lib.cli.arguments import Device, Json, Mitigations, TaskName, as_path
from replay_lib.cli.keeping import Call, keeping
from replay_lib.cli.output import error_document, print_error, print_json, progress, stdout
from replay_lib.errors import SpikeReplayError
from replay_lib.exit_codes import ExitCode
from replay_lib.methods import load_methods
from replay_lib.pin import Pinned, Wish, labels_to_pin
from replay_lib.pin import pin as pin_case
from replay_lib.run import ReplayOptions


def pin(
    context: typer.Context,
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
    task: TaskName = None,
    json: Json = False,
) -> None:
    """Replay METHODS on CASE and write their verdicts into its case.yaml, as they fall."""
    options = ReplayOptions(device=device, mitigations=tuple(mitigations or ()))
    wish = Wish(widen=widen, replace=replace)
    with keeping(Call(context, task, case), methods or _planned(case, options)) as kept:
        with progress() as tell:
            pinned = pin_case(
                case,
                methods or [],
                options,
                tell,
                write=not dry_run,
                wish=wish,
                keep=kept.keep,
            )
        if json:
            print_json(_document(pinned) | error_document(kept.retry()))
        else:
            _show(pinned, case, dry_run)
        kept.exit_code = _exit_code(pinned)
    raise typer.Exit(kept.status)


def _planned(case: Path, options: ReplayOptions) -> list[str]:
    """The methods that will be pinned; none where the case is broken, which is told later."""
    try:
        return labels_to_pin(Case.load(case), load_methods(options.mitigations))
    except SpikeReplayError:
        return []


def _show(pinned: Pinned, case: Path, dry_run: bool) -> None:
    stdout().print(_table(pinned))
    for refusal in pinned.refused:
        print_error(refusal.error.code, str(refusal.error), as_json=False)
    for line in _held(pinned, case):
        stdout().print(line, soft_wrap=True)
    stdout().print("\n".join(filter(None, [pinned.left_out, _said(pinned, dry_run)])))


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
