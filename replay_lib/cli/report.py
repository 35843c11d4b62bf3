"""``spike-replay report``: a task's report out of its ledger; nothing is replayed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from replay_lib.cli.arguments import Json
from replay_lib.cli.output import print_json, stdout
from replay_lib.cli.units import printable
from replay_lib.record.markdown import visible_command
from replay_lib.record.task import Task
from replay_lib.report.view import headline
from replay_lib.report.writing import Written, write_report


def report(
    job: Annotated[str, typer.Argument(help="The task: a job's name, as in --task.")],
    *,
    json: Json = False,
) -> None:
    """Write the report of JOB: a page and a text, from what its ledger holds.

    agent-task/spike-replay/JOB.report.html needs nothing beside it: no network, no script.
    JOB.report.md beside it says the same. A plot whose data nobody has taken yet says which
    command would.
    """
    written = write_report(Task(job))
    if json:
        print_json(_document(written))
        return
    out = stdout()
    out.print(printable(headline(written.facts)), markup=False, soft_wrap=True)
    out.print(f"{written.page}\n{written.text}", markup=False, soft_wrap=True)
    for one in written.plots:
        if one.plot is None:
            out.print(printable(f"not drawn: {one.title}. {one.why}"), markup=False, soft_wrap=True)
            if one.command:
                out.print(f"  {visible_command(one.command)}", markup=False, soft_wrap=True)


def _document(written: Written) -> dict[str, Any]:
    return {
        "task": written.facts.job,
        "page": str(written.page),
        "report": str(written.text),
        "sha256": written.sha256,
        "headline": headline(written.facts),
        "plots": [
            {
                "name": one.name,
                "drawn": one.plot is not None,
                "why": one.why,
                "command": one.command,
            }
            for one in written.plots
        ],
    }
