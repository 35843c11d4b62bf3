"""The command line, ``spike-replay``: one of the two doors. No logic of its own, no torch."""

from replay_lib.cli.commands import app
from replay_lib.cli.entry import main

__all__ = ["app", "main"]
