"""``spike-replay analyze``: what a step's data say about its spike, before any mitigation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replay_lib.analysis.signals.summary import Signals
from replay_lib.cli.arguments import Device, Json, TaskName, as_path
from replay_lib.cli.keeping import Call, keeping
from replay_lib.cli.output import print_json, progress, stdout
from replay_lib.cli.signals_view import print_signals
from replay_lib.run import Step


def analyze(
    context: typer.Context,
    case: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT_OR_CASE", parser=as_path, help="A snapshot or a case directory."
        ),
    ],
    *,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            parser=as_path,
            help="A tokenizer.json, or a directory with one: tokens that stand out are told as "
            "text too.",
        ),
    ] = None,
    session: Annotated[
        bool,
        typer.Option(
            "--session",
            help="Run the model forward too, on one rank: how the saved routes agree with its own, "
            "and how far its log-probabilities are from the recorded ones.",
        ),
    ] = False,
    device: Device = "auto",
    task: TaskName = None,
    json: Json = False,
) -> None:
    """Tell what a step's data say about its spike: advantages, ratios, lengths, routes, rewards.

    Signs of trouble come first, each with its figure, the bound and the reason of the bound.
    docs/analyze.md has the meaning of every figure. The ledger keeps the same as --json gives.
    """
    with keeping(Call(context, task, case), None) as kept:
        signals = _analyzed(case, tokenizer, session=session, device=device)
        document = signals.model_dump(mode="json", by_alias=True)
        kept.analyzed(signals.snapshot, document)
        if json:
            print_json(document)
        else:
            print_signals(signals, stdout())
    raise typer.Exit(kept.status)


def _analyzed(case: Path, tokenizer: Path | None, *, session: bool, device: str) -> Signals:
    from replay_lib.analysis.signals.analyzing import analyze as analyze_case
    from replay_lib.analysis.signals.text import decoder

    decode = None if tokenizer is None else decoder(tokenizer)
    with progress() as tell:

        def told(done: int, of: int) -> None:
            tell(Step(case=case.name, what="ranks read", done=done, total=of))

        return analyze_case(case, decode=decode, session=session, device=device, tell=told)
