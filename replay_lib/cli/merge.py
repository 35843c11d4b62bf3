"""``spike-replay merge``: what shards of the suite left, as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replay_lib.cli.arguments import as_path
from replay_lib.cli.output import print_json, stdout
from replay_lib.exit_codes import ExitCode
from replay_lib.record.run_folder import merge_runs


def merge(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", parser=as_path, help="The folder for the whole run.")
    ],
    shards: Annotated[
        list[Path],
        typer.Argument(
            metavar="SHARD...", parser=as_path, help="Folders of pytest --spike-results."
        ),
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
    ] = False,
) -> None:
    """Merge what shards of the suite left into OUT: results, outcomes and one report.

    Of two lines about one test or replay that of the later folder counts, and in a folder the later
    line. A test that did not run, a failed one or an absent shard gives exit code 1.
    """
    run = merge_runs(out, shards)
    if json:
        print_json(
            {
                "green": run.green,
                "tests": [one.model_dump() for one in run.tests],
                "not_run": run.not_run,
                "faults": list(run.plan.faults),
                "results": [result.as_json() for result in run.results],
            }
        )
    else:
        stdout().print(run.report(), end="", soft_wrap=True)
    raise typer.Exit(ExitCode.GREEN if run.green else ExitCode.RED)
