"""``spike-replay sweep --combine``: single methods, pairs of what helped, the Pareto front."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from replay_lib.case import Case
from replay_lib.cli.output import error_document, print_json, progress, stdout
from replay_lib.cli.remote import sweep_at
from replay_lib.cli.views import print_replayed, replayed_document
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import UsageError
from replay_lib.record.keeping import Kept
from replay_lib.remote.replaying import Remote
from replay_lib.run import ReplayOptions
from replay_lib.sweep.report import TITLES, document, front_rows, remarks
from replay_lib.sweep.sweeping import BUDGET, Swept

MOST = 2  # methods at once


def check_combine(combine: int | None, budget: int | None) -> int | None:
    """The budget of a search, None where none is asked for; UsageError for what contradicts."""
    if combine is None:
        if budget is not None:
            raise UsageError("--budget: found no --combine, which it bounds; expected both")
        return None
    if combine != MOST:
        raise UsageError(f"--combine: found {combine}, expected {MOST}: pairs are searched")
    if budget is not None and budget < 1:
        raise UsageError(f"--budget: found {budget}, expected 1 experiment or more")
    return BUDGET if budget is None else budget


def combine_methods(
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    *,
    place: Remote | None,
    budget: int,
    results: Path | None,
    json: bool,
    kept: Kept,
) -> int:
    """Search, show what came of it, and give the exit code."""
    started = time.monotonic()
    with progress() as tell:
        swept = sweep_at(
            place, kept, case, experiments, options, budget=budget, file=results, tell=tell
        )
    kept.complete(swept.results)
    if json:
        seconds = time.monotonic() - started
        told = replayed_document(swept.replayed, seconds) | {"exit_code": swept.exit_code}
        print_json(told | {"sweep": document(swept)} | error_document(kept.retry()))
    else:
        _show(swept)
    return swept.exit_code


def _show(swept: Swept) -> None:
    console = stdout()
    print_replayed(swept.replayed, console)
    console.print()
    for line in remarks(swept):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    if not swept.front.members:
        console.print("the Pareto front is empty, for the reasons above")
        return
    table = Table(header_style="bold", box=None, pad_edge=False)
    for number, title in enumerate(TITLES):
        table.add_column(title, overflow="fold", justify="left" if number in (0, 4) else "right")
    for row in front_rows(swept):
        table.add_row(*row)
    console.print(table)
