"""How arguments are read that more than one command has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from replay_lib.errors import UsageError
from replay_lib.run import LEAST_REPEATS


def as_path(text: str | Path) -> Path:
    """A path as written; the empty one would be the current directory, which nobody meant.

    UsageError too for one that the system cannot look up: a name of 5,000 characters, say.
    """
    if not str(text):
        raise UsageError("a path: found an empty text, expected a file or a directory")
    try:
        os.lstat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass  # for the command to say, or to make
    except (OSError, ValueError) as error:
        found = f"{str(text)!r:.60} ({getattr(error, 'strerror', None) or error})"
        raise UsageError(f"a path: found {found}, expected one that can be looked up") from error
    return Path(text)


Layout = Annotated[
    str,
    typer.Option(
        metavar="AXES",
        help="Ranks that replay, as in tp=2 or ep=2,dp=2 (tp, pp, cp, ep, dp); auto: one, or the "
        "recorded layout folded onto the GPUs where one is too small.",
    ),
]
Nnodes = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Machines that replay together, each with an equal part of the ranks of --layout; "
        "the others run spike-replay join.",
    ),
]
RdzvEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="With --nnodes: an address of this machine, and a free port."
    ),
]
JoinTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How long the machines wait for each other."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="auto takes cuda where an NVIDIA device is found."),
]
Precision = Annotated[
    Literal["recorded", "float32", "bfloat16"],
    typer.Option(help="The dtype to replay in; recorded is the run's own."),
]
DpRanks = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Replay these recorded data-parallel ranks only: a diagnostic, not full-fidelity.",
    ),
]
Rows = Annotated[
    Literal["recorded", "merged", "unmerged"],
    typer.Option(
        help="Rows that are prefix trees: as the trainer packed them (recorded; merged refuses a "
        "snapshot without any), or each path as a row of its own."
    ),
]
Deterministic = Annotated[
    bool, typer.Option(help="Deterministic algorithms wherever the device has them.")
]
Mitigations = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR", parser=as_path, help="A directory with methods of your own; may be repeated."
    ),
]
Trainer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Whose loss is replayed: grpo (built in), axrl (the installed one), module:factory.",
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        metavar="N",
        help=f"Replay the baseline N times, {LEAST_REPEATS} at least; the spread of its norm "
        "enters the noise band.",
    ),
]
Backend = Annotated[
    Literal["native", "axrl"],
    typer.Option(help="What replays: this library's engine, or AXRL's own worker on its GPUs."),
]
Against = Annotated[
    str,
    typer.Option(metavar="METHOD", help="Compare with this experiment instead of the baseline."),
]
ResultsFile = Annotated[
    Path | None,
    typer.Option("--results", metavar="FILE", parser=as_path, help="Append the results to FILE."),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="JOB",
        help="Keep everything in the ledger of this task [default: the job that the snapshot "
        "was preserved for, or that its output directory names].",
    ),
]
METHOD_SYNTAX = (
    "A method is a slug, slug:name=value,name=value, or module:function; a+b applies both."
)
