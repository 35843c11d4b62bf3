"""``spike-replay record-method``: a proven method's card, out of a task's ledger."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from replay_lib import layout
from replay_lib.cli.arguments import Device, Json, Mitigations, as_path
from replay_lib.cli.output import print_json, stderr, stdout
from replay_lib.method_cards.writing import Wish, Written, record_method
from replay_lib.record.task import Task
from replay_lib.run import ReplayOptions


def record_method_command(
    method: Annotated[
        str, typer.Argument(help="A method as it was replayed: a slug, or module:function.")
    ],
    *,
    task: Annotated[
        str, typer.Option("--task", metavar="JOB", help="The task whose ledger has its results.")
    ],
    experiment: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The experiment, where it was tried with several sets of parameters.",
        ),
    ] = None,
    rationale: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Why it works; asked for where it is not given."),
    ] = None,
    cards: Annotated[
        Path,
        typer.Option(metavar="DIR", parser=as_path, help="Where cards are."),
    ] = Path(layout.CARDS),
    device: Device = "auto",
    mitigations: Mitigations = None,
    json: Json = False,
) -> None:
    """Write METHOD's card, or add to it, from what the ledger of a task says of it.

    The snapshot is replayed once more, with the recorded methods that act at the same seams: a
    method whose gradient is theirs is not recorded. Nor is what fails, touches nothing, is
    degenerate, inconclusive, old_sensitive, reduced or beyond the budget. What people wrote on a
    card stays; the index beside the cards is written anew.
    """
    options = ReplayOptions(device=device, mitigations=tuple(mitigations or ()))
    wish = Wish(method=method, experiment=experiment, rationale=rationale)
    written = record_method(Task(task), wish, options, cards, _asker(json))
    for slug, why in written.beside.untold.items():
        stderr().print(f"not compared with {slug}: {why}", markup=False, soft_wrap=True)
    if json:
        print_json(_document(written))
        return
    told = "written" if written.new else "added to"
    line = f"{written.method}: {written.status}. {written.card} is {told}."
    stdout().print(line, markup=False, soft_wrap=True)


def _asker(json: bool) -> Callable[[], str | None]:
    """Asks at a terminal alone: a script gets the error that names the option."""

    def ask() -> str | None:
        if json or not sys.stdin.isatty():
            return None
        return str(typer.prompt("Why does it work?", err=True))

    return ask


def _document(written: Written) -> dict[str, object]:
    return {
        "method": written.method,
        "card": str(written.card),
        "status": str(written.status),
        "new": written.new,
        "cosines": dict(written.beside.cosines),
        "not_compared": dict(written.beside.untold),
    }
