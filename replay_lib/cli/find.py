"""``spike-replay find``: from a job's name to its snapshots."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from replay_lib.cli.arguments import Json, as_path
from replay_lib.cli.output import print_json, stderr, stdout
from replay_lib.cli.units import age_text, printable, size_text
from replay_lib.errors import UsageError
from replay_lib.finding import Found, Row, find
from replay_lib.finding.looking import MEANS
from replay_lib.record import ledger
from replay_lib.record.task import Task


def find_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="JOB_OR_PATH",
            help="A job's name, or the path of an output directory, of spike_snapshots/ or of one "
            "snapshot (iter_*). What has a / in it is a path.",
        ),
    ],
    *,
    outputs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="ROOT",
            parser=as_path,
            help="Where output directories *~<job>__<role> lie; may be repeated "
            "[default: SPIKE_REPLAY_OUTPUTS, parted by :].",
        ),
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="The role, where a job has several.")
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            parser=as_path,
            help="A log of the job (plain, .gz, .bz2, .xz, .zst): copied under tmp/spike-replay/ "
            "and read for spikes that were rotated away; may be repeated.",
        ),
    ] = None,
    logs: Annotated[
        bool, typer.Option("--logs", help="Read every log in the output directory too.")
    ] = False,
    json: Json = False,
) -> None:
    """Find a job's snapshots: what they are, which are preserved, which go next.

    Several output directories of a job are listed, and nothing is chosen: name a role or a path.
    """
    found = find(target, outputs or (), role, log or (), every_log=logs)
    document = found.as_json()
    if not json:
        _tell(found)  # what was seen is told, even where it cannot be kept
    if found.place.job == target:  # not for a path: looking into a directory is no work on a task
        _keep(target, document)
    if json:
        print_json(document)


def _keep(job: str, document: dict[str, object]) -> None:
    try:
        task = Task(job)
    except UsageError as error:  # a directory's name may hold what no task's name may
        stderr().print(printable(f"not kept in a ledger: {error}"), soft_wrap=True)
        return
    output = document["output_directory"]
    ledger.append(
        task,
        "found",
        target=document["target"],
        output_directories=[output] if output else [],
        snapshots=document["snapshots"],
        spikes_in_logs=document["spikes_in_logs"],
    )


def _tell(found: Found) -> None:
    console, place = stdout(), found.place
    for note in place.notes:
        stderr().print(printable(note), soft_wrap=True)
    console.print(printable(f"output directory: {place.output or 'none known'}"), soft_wrap=True)
    console.print(printable(f"job: {place.job or '-'}  role: {place.role or '-'}"), soft_wrap=True)
    for root in place.roots:
        rows = [row for row in found.rows if row.root == root]
        console.print(printable(f"\n{root}"), soft_wrap=True)
        console.print(_table(rows) if rows else "no snapshot")
        _tell_rows(rows)
    _tell_logs(found)
    if found.leftovers:
        told = ", ".join(path.name for path in found.leftovers)
        then = "the next preserve or release here removes it"
        console.print(printable(f"left by a killed command: {told} ({then})"), soft_wrap=True)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "norm", "median", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("ranks", "payloads", "files", "size", "age", "state", "preserved"):
        table.add_column(name, no_wrap=name not in ("state",))
    for row in rows:
        table.add_row(
            str(row.step),
            *map(_number, (row.grad_norm_preclip, row.grad_norm_median, row.ratio)),
            _layout(row),
            "-" if row.payloads is None else f"{row.payloads} ({row.routing_files} ranks)",
            str(row.files),
            size_text(row.bytes),
            age_text(row.age),
            _state(row),
            _preserved(row),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _layout(row: Row) -> str:
    if row.layout is None:
        return "-"
    axes = {name: count for name, count in row.layout.items() if name != "world_size"}
    told = " ".join(f"{name}{n}" for name, n in axes.items() if n > 1)
    return f"{row.layout['world_size']}" + (f": {told}" if told else "")


def _state(row: Row) -> str:
    if not row.complete:
        return "broken"
    if row.path is None:
        return "rotated away"
    return "goes next" if row.goes_next else "complete"


def _preserved(row: Row) -> str:
    if row.preserved is None:
        return "no"
    if row.preserved_why:
        return "CHANGED"
    return (
        "yes"
        if row.hashed == row.preserved_files
        else f"yes, sha256 {row.hashed}/{row.preserved_files}"
    )


def _tell_rows(rows: list[Row]) -> None:
    """What a cell has no room for, and what to do."""
    console = stdout()
    for row in rows:
        if row.why:
            console.print(printable(f"step {row.step}: {row.why}"), soft_wrap=True)
        if row.preserved_why:
            told = f"step {row.step}, {row.preserved}: {row.preserved_why}"
            console.print(printable(told), soft_wrap=True)
    limit = next((r.max_snapshots for r in reversed(rows) if r.max_snapshots is not None), None)
    doomed = [row for row in rows if row.goes_next]
    bare = [row for row in doomed if row.preserved is None]
    if doomed:
        steps = ", ".join(str(row.step) for row in doomed)
        console.print(f"the next spike deletes step {steps} (max_snapshots is {limit})")
    if bare and bare[0].path is not None:
        told = f"keep it: spike-replay preserve {shlex.quote(str(bare[0].path))}"
        console.print(printable(told), soft_wrap=True)


def _tell_logs(found: Found) -> None:
    console = stdout()
    if found.told:
        table = Table("step", "norm", "time", "lines", "fate", box=None, pad_edge=False)
        for one in found.told:
            fate = f"{one.fate}: {MEANS[one.fate]}"
            table.add_row(str(one.step), one.norm, one.at, str(one.lines), fate)
        console.print()
        console.print(table)
    for log in found.logs:
        odd = f", {len(log.non_finite_steps)} steps with NaN/Inf" if log.non_finite_steps else ""
        cut = f"; {log.cut}" if log.cut else ""
        told = f"{log.path}: {len(log.mentions)} spikes{odd} in {size_text(log.bytes)}{cut}"
        console.print(printable(told), soft_wrap=True)
    if found.output is not None:
        console.print(printable(f"copied to {found.output}"), soft_wrap=True)
    if found.unread:
        names = ", ".join(path.name for path in found.unread[:5])
        told = f"logs not read: {len(found.unread)} ({names}); --logs reads them"
        console.print(printable(told), soft_wrap=True)
