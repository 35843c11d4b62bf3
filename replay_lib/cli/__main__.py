"""``python -m replay_lib.cli``: the command where the package is not installed."""

from replay_lib.cli.entry import main

main()
