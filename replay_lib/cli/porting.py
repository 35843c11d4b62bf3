"""``spike-replay export`` and ``import``: snapshots and cases without a pickle, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replay_lib.cli.arguments import Json, as_path
from replay_lib.cli.output import key_value_table, print_json, stdout
from replay_lib.porting import Ported, export_case, import_case

Out = Annotated[
    Path, typer.Argument(metavar="OUT", parser=as_path, help="A new directory for what is written.")
]


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT_OR_CASE", parser=as_path, help="A snapshot or a case directory."
        ),
    ],
    out: Out,
    json: Json = False,
) -> None:
    """Write a snapshot or a case without a pickle: safetensors and JSON, sealed by sha256."""
    _print(export_case(source, out), as_json=json)


def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="CASE", parser=as_path, help="What export wrote."),
    ],
    out: Out,
    json: Json = False,
) -> None:
    """Write what export wrote in the trainer's own layout again."""
    _print(import_case(source, out), as_json=json)


def _print(ported: Ported, *, as_json: bool) -> None:
    places = [str(snapshot.path) for snapshot in ported.snapshots]
    document = {
        "directory": str(ported.directory),
        "snapshots": places,
        "portable": all(snapshot.portable for snapshot in ported.snapshots),
        "files": ported.files,
        "bytes": ported.bytes,
        "cleared": [str(path) for path in ported.cleared],
    }
    if as_json:
        print_json(document)
        return
    cleared = document.pop("cleared")
    stdout().print(key_value_table(document | {"snapshots": ", ".join(places)}))
    if cleared:
        told = ", ".join(path.name for path in ported.cleared)
        stdout().print(f"removed what killed commands had left: {told}", soft_wrap=True)
