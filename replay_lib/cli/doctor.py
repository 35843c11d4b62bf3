"""``spike-replay doctor``: what is wrong with a snapshot, or with this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from replay_lib.analysis import Examined, Finding, Severity, describe_environment, examine_case
from replay_lib.cli.arguments import as_path
from replay_lib.cli.output import key_value_table, print_json, stdout
from replay_lib.exit_codes import ExitCode

_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: ""}


def doctor(
    snapshot: Annotated[
        Path | None,
        typer.Argument(
            parser=as_path, help="A snapshot (iter_*) or a case directory; none: this machine."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
    ] = False,
) -> None:
    """Read all of a snapshot without a model and tell what is wrong; alone: what runs here."""
    if snapshot is None:
        _tell_environment(json)
        return
    examined = examine_case(snapshot)
    code = ExitCode.FINDINGS if examined.count(Severity.ERROR) else ExitCode.GREEN
    if json:
        print_json(examined.as_json() | {"exit_code": int(code)})
    else:
        _tell_findings(examined)
    raise typer.Exit(code)


def _tell_findings(examined: Examined) -> None:
    console = stdout()
    if examined.findings:
        table = Table("severity", "code", "where", "found", "what to do", box=None, pad_edge=False)
        for each in examined.findings:
            severity = Text(str(each.severity), style=_STYLES[each.severity])
            # Text: paths and values may look like markup
            cells = (each.code, _where(each), each.found, each.then)
            table.add_row(severity, *map(Text, cells))
        console.print(table)
    counts = ", ".join(f"{examined.count(s)} {s}s" for s in Severity)
    read = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in examined.read.items())
    console.print(f"\n{counts}; read: {read}")


def _where(found: Finding) -> str:
    places = {
        "dp rank": found.dp_rank,
        "row": found.row,
        "token": found.token,
        "layer": found.layer,
    }
    told = " ".join(f"{name} {value}" for name, value in places.items() if value is not None)
    return f"{found.file}\n{told}" if told else found.file


def _tell_environment(as_json: bool) -> None:
    described = describe_environment()
    if as_json:
        print_json(described)
        return
    plain: dict[str, Any] = {
        k: v for k, v in described.items() if k not in ("packages", "backends")
    }
    plain |= {name: v or "not installed" for name, v in described["packages"].items()}
    for name, backend in described["backends"].items():
        lacks = ", ".join(backend["lacks"])
        plain[f"backend {name}"] = f"lacks {lacks}" if lacks else "would run here"
    stdout().print(key_value_table(plain))
