"""``spike-replay release``: delete a preserved snapshot that nobody needs any more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replay_lib.cli.arguments import Json, as_path
from replay_lib.cli.output import print_json, stdout
from replay_lib.cli.units import printable, size_text
from replay_lib.preserving import Released, release

CASES = Path("spike_cases")


def release_command(
    preserved: Annotated[
        Path,
        typer.Argument(
            metavar="PRESERVED", parser=as_path, help="A snapshot in spike_snapshots-active/."
        ),
    ],
    *,
    task: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="A task that it belongs to, beside those that are known."),
    ] = None,
    cases: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            parser=as_path,
            help=f"Cases that may refer to it; may be repeated [default: {CASES}/, where it is].",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Delete a preserved snapshot whose task is finished and whose report is written.

    Refused, with every reason at once, while a task of it goes on or a case refers to it. The
    trainer's own snapshot is never touched.
    """
    default = [CASES] if CASES.is_dir() else []
    released = release(preserved, task=task, cases=cases or default)
    if json:
        print_json(_document(released))
        return
    lines = [f"released: {released.path}"]
    if released.before:
        lines.append("  it was gone already; the ledger says so now")
    else:
        freed = f"{size_text(released.freed)} freed of {size_text(released.bytes)}"
        lines.append(f"  {released.files} files, {freed}; the rest has other names")
    lines += [f"  removed what a killed command had left: {p.name}" for p in released.cleared]
    stdout().print(printable("\n".join(lines)), soft_wrap=True)


def _document(released: Released) -> dict[str, object]:
    return {
        "released": str(released.path),
        "tasks": list(released.tasks),
        "files": released.files,
        "bytes": released.bytes,
        "freed": released.freed,
        "gone_before": released.before,
        "cleared": [str(path) for path in released.cleared],
    }
