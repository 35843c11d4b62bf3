"""``python -m replay_lib.cli``: the command where the package is not installed."""

from replay_lib.cli.main import main

main()
