"""``--ssh``: the same command on a GPU node; what is printed and kept is the same, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import UsageError
from replay_lib.guard.guarding import Guarded
from replay_lib.guard.guarding import guard as guard_here
from replay_lib.guard.reference import Reference
from replay_lib.record import ledger
from replay_lib.record.keeping import Kept
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.record.results_file import append_results, read_results
from replay_lib.remote import replaying
from replay_lib.remote.replaying import Remote
from replay_lib.remote.shell import Node
from replay_lib.run import Replayed, ReplayOptions, Tell, replay_case
from replay_lib.sweep.sweeping import Swept
from replay_lib.sweep.sweeping import sweep as sweep_here

Ssh = Annotated[
    str | None,
    typer.Option(
        "--ssh",
        metavar="COMMAND",
        help='Replay on the node that this command logs in to, as in "ssh -p 26461 root@host". '
        "If the connection breaks, repeat the command: docs/gpu-node.md.",
    ),
]
RemotePython = Annotated[
    str | None,
    typer.Option(
        "--remote-python",
        metavar="PATH",
        help="With --ssh: the interpreter there [default: the first that has torch and the rest].",
    ),
]
RemoteDir = Annotated[
    str | None,
    typer.Option(
        "--remote-dir",
        metavar="DIR",
        help="With --ssh: where the node keeps what is copied [default: ~/.cache/spike-replay].",
    ),
]


def place_of(ssh: str | None, python: str | None, directory: str | None) -> Remote | None:
    """Where a command replays; None: here. UsageError for options that say nothing."""
    if ssh is None:
        given = {"--remote-python": python, "--remote-dir": directory}
        odd = [name for name, value in given.items() if value is not None]
        if odd:
            raise UsageError(f"{odd[0]}: found no --ssh, whose node it is about; expected both")
        return None
    Node.parse(ssh)  # before anything is started
    return Remote(ssh=ssh, python=python, directory=directory)


def replay_at(
    place: Remote | None,
    kept: Kept,
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    *,
    tell: Tell,
) -> Replayed:
    """``replay_case``, here or on a node."""
    if place is None:
        return replay_case(case, experiments, options, tell, keep=kept.keep)
    at = _beside(place, [kept])
    return replaying.replay(at, case, experiments, options, tell=tell, keep=kept.keep)


def sweep_at(
    place: Remote | None,
    kept: Kept,
    case: Case,
    experiments: Sequence[Experiment],
    options: ReplayOptions,
    *,
    budget: int,
    file: Path | None,
    tell: Tell,
) -> Swept:
    """``sweep``, here or on a node; ``file`` is read and written here."""
    if place is None:
        more = {"budget": budget, "file": file, "tell": tell, "keep": kept.keep}
        return sweep_here(case, experiments, options, **more)  # type: ignore[arg-type]
    known = read_results(file) if file is not None and file.is_file() else []
    written = {replaying.key_of(result.as_json()) for result in known}

    def write(one: Result) -> None:
        key = replaying.key_of(one.as_json())
        if file is not None and key not in written:
            append_results(file, [one])
            written.add(key)

    def keep(one: Result | Refusal) -> None:
        kept.keep(one)
        if isinstance(one, Result):
            write(one)

    swept = replaying.sweep(
        _beside(place, [kept]),
        case,
        experiments,
        options,
        budget=budget,
        known=known,
        tell=tell,
        keep=keep,
    )
    for result in swept.results:  # some are in the ledger of a command that broke off before
        write(result)
    return swept


def guard_at(
    place: Remote | None,
    keeps: Iterable[Kept],
    cases: Sequence[Case],
    labels: Sequence[str],
    options: ReplayOptions,
    *,
    reference: Reference,
    tell: Tell,
    keep: Callable[[Result | Refusal, str], None],
) -> Guarded:
    """``guard``, here or on a node."""
    if place is None:
        return guard_here(cases, labels, options, reference, tell, keep=keep)
    at = _beside(place, list(keeps))
    return replaying.guard(at, cases, labels, options, reference=reference, tell=tell, keep=keep)


def _beside(place: Remote, keeps: Sequence[Kept]) -> Remote:
    """``place`` with the output of this command, and what the ledgers have already."""
    tasks = dict.fromkeys(kept.task for kept in keeps if kept.task is not None)
    events = [event for task in tasks for event in ledger.read(task) if event.kind == "result"]
    earlier = frozenset(replaying.key_of(event.data["result"]) for event in events)
    output = next((kept.output for kept in keeps if kept.output is not None), None)
    return dataclasses.replace(place, output=output, earlier=earlier)
