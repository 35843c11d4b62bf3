"""How arguments are read that more than one command has."""

from __future__ import annotations

from pathlib import Path

from replay_lib.errors import UsageError


def as_path(text: str | Path) -> Path:
    """A path as written; the empty one would be the current directory, which nobody meant."""
    if not str(text):
        raise UsageError("a path: found an empty text, expected a file or a directory")
    return Path(text)
