"""How arguments are read that more than one command has."""

from __future__ import annotations

import os
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
