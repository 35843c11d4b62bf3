"""The command line, ``spike-replay``: one of the two doors. No logic of its own, no torch."""

from replay_lib.cli.main import app, main

__all__ = ["app", "main"]
