"""``spike-replay task``: what is known of a job, and notes about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from replay_lib.cli.arguments import Json
from replay_lib.cli.output import print_json, stderr, stdout
from replay_lib.errors import UsageError, did_you_mean, fault
from replay_lib.record import ledger
from replay_lib.record.history import history_of
from replay_lib.record.task import Task
from replay_lib.record.task_file import document, render, text_of
from replay_lib.record.task_page import state_of

task = typer.Typer(
    help="What is known of a job: its task file, rendered from the ledger of all commands.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's name, as task list shows it.")]
Text = Annotated[str, typer.Argument(metavar="TEXT", help="One line of your own words.")]


@task.command("list")
def list_tasks(json: Json = False) -> None:
    """List the tasks that are kept below the current directory."""
    rows = [_row(one) for one in ledger.tasks()]
    if json:
        print_json({"tasks": rows})
        return
    if not rows:
        stdout().print(_NONE, soft_wrap=True)
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    stdout().print(table)


@task.command()
def show(job: Job, json: Json = False) -> None:
    """Render the task file of JOB and show it."""
    found = _find(job)
    told = text_of(found)
    try:
        _render(found)
        told = found.file.read_text(encoding="utf-8", errors="replace")
    except UsageError as error:  # who may only read is shown what there is
        stderr().print(f"not rendered: {error}", soft_wrap=True)
    if json:
        print_json(document(found))
    else:
        stdout().print(told, soft_wrap=True)


@task.command("render")
def render_file(job: Job, json: Json = False) -> None:
    """Write the task file of JOB anew from its ledger; notes typed into it stay."""
    found = _find(job)
    _render(found)
    _said(found, json=json)


@task.command()
def note(job: Job, text: Text, json: Json = False) -> None:
    """Add an observation about JOB."""
    _add(job, "observation", text, json=json)


@task.command("next")
def next_step(job: Job, text: Text, json: Json = False) -> None:
    """Add a next step of JOB."""
    _add(job, "next_step", text, json=json)


@task.command()
def finish(
    job: Job,
    text: Annotated[str, typer.Argument(metavar="[TEXT]", help="How it ended.")] = "",
    json: Json = False,
) -> None:
    """State that nothing more is to be done about JOB: its snapshots may be released."""
    found = _find(job)
    ledger.read(found)
    ledger.append(found, "finished", text=text)
    _render(found)
    if not json:
        for event in history_of(ledger.read(found)).active:
            place = event.data.get("preserved")
            stdout().print(f"still preserved: {place}", soft_wrap=True)
    _said(found, json=json)


_NONE = (
    "no task below the current directory; one begins with the first command that has --task JOB, "
    "or whose snapshot names its job"
)


def _row(one: Task) -> dict[str, object]:
    try:
        history = history_of(ledger.read(one))
    except UsageError:  # the others can be listed; why is told at the end, as of every command
        unknown = dict.fromkeys(("experiments", "failures", "active_snapshots"))
        return {"job": one.job, "state": "unreadable", **unknown, "last": "-"}
    ends = [attempt.at for attempt in history.attempts] + [c.at for c in history.commands]
    return {
        "job": one.job,
        "state": state_of(history),
        "experiments": len(history.results),
        "failures": len(history.failures),
        "active_snapshots": len(history.active),
        "last": f"{max(ends):%Y-%m-%d %H:%M}" if ends else "-",
    }


def _find(job: str) -> Task:
    """The task of ``job``; UsageError where nothing was kept under that name."""
    found = Task(job)
    if not found.ledger.is_file():
        known = [one.job for one in ledger.tasks()]
        hint = did_you_mean(job, known) or (f"known: {', '.join(known)}" if known else _NONE)
        raise UsageError(fault(Path(found.ledger), None, "no such task", "a ledger", hint))
    return found


def _add(job: str, kind: str, text: str, *, json: bool) -> None:
    if not text.strip():
        raise UsageError(f"task {job}: found no text, expected a line of words")
    found = _find(job)
    ledger.read(found)  # one that cannot be read is told before something is added to it
    ledger.append(found, kind, text=text)
    _render(found)
    _said(found, json=json)


def _render(found: Task) -> None:
    for line in render(found):
        stderr().print(line, soft_wrap=True)


def _said(found: Task, *, json: bool) -> None:
    if json:
        print_json({"job": found.job, "file": str(found.file)})
    else:
        stdout().print(f"{found.file} was written", soft_wrap=True)
