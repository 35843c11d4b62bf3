"""How arguments are read that more than one command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replay_lib.errors import UsageError

Layout = Annotated[
    str,
    typer.Option(
        metavar="AXES",
        help="Ranks that replay, as in tp=2 or ep=2,dp=2 (tp, pp, cp, ep, dp); auto: one, or the "
        "recorded layout folded onto the GPUs where one is too small.",
    ),
]


def as_path(text: str | Path) -> Path:
    """A path as written; the empty one would be the current directory, which nobody meant."""
    if not str(text):
        raise UsageError("a path: found an empty text, expected a file or a directory")
    return Path(text)
