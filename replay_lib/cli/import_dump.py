"""``spike-replay import-dump``: another trainer's debug dump as a snapshot to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from replay_lib.cli.arguments import Json, as_path
from replay_lib.cli.output import print_json, stdout
from replay_lib.importing.dumps import AUTO
from replay_lib.importing.dumps import import_dump as import_file
from replay_lib.snapshot.imported import as_document


def import_dump(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            parser=as_path,
            help="slime: a .pt of --save-debug-train-data or --save-debug-rollout-data. verl: a "
            "DataProto saved with save_to_disk, or a .jsonl of trainer.rollout_data_dir.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", parser=as_path, help="A new directory: the snapshot.")
    ],
    *,
    format_: Annotated[
        str, typer.Option("--format", metavar="slime|verl|auto", help="Whose dump it is.")
    ] = AUTO,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            parser=as_path,
            help="A tokenizer.json, or a directory with one: for verl's .jsonl, which holds text.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a snapshot of slime's or verl's debug dump, on which show, doctor and analyze work.

    Tells field by field what was taken and what is missing for a replay (always: the weights).
    Nothing that the file names is run. docs/importing.md
    """
    snapshot = import_file(file, out, format_=format_, tokenizer=tokenizer)
    assert snapshot.imported is not None
    rows = snapshot.worker.global_batch_size
    if json:
        document = {"directory": str(snapshot.path), "step": snapshot.step, "rows": rows}
        print_json(document | {"imported": as_document(snapshot.imported)})
        return
    console = stdout()
    head = f"{snapshot.path}: step {snapshot.step}, {rows} rows, {snapshot.parallel.dp} rank(s)"
    console.print(f"{head}, from a {snapshot.imported.format} dump", markup=False, soft_wrap=True)
    table = Table("field", "state", "what")
    for one in snapshot.imported.fields:
        table.add_row(one.name, str(one.state), one.told)
    console.print(table)
