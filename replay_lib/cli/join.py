"""``spike-replay join``: be one of several machines of a replay."""

from __future__ import annotations

from typing import Annotated

import typer

from replay_lib.cli.arguments import JoinTimeout
from replay_lib.cli.output import print_json, stdout
from replay_lib.engine.joining import join as join_nodes
from replay_lib.engine.nodes import JOIN_TIMEOUT_S


def join(
    endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Where the machine that replays waits, as it was told there.",
        ),
    ],
    node_rank: Annotated[
        int | None,
        typer.Option(metavar="R", help="This machine's number, from 1 on [default: a free one]."),
    ] = None,
    join_timeout: JoinTimeout = JOIN_TIMEOUT_S,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
    ] = False,
) -> None:
    """Lend this machine's ranks to a replay over several machines, until that is over.

    Start it on every machine but the one that runs replay, sweep or pytest with --nnodes. All
    machines need this program in the same versions and the snapshot at the same path. An error
    that ends the replay ends this command with it.
    """

    def tell(line: str) -> None:
        if not json:
            stdout().print(line, markup=False, highlight=False, soft_wrap=True)

    join_nodes(endpoint, node_rank, timeout_s=join_timeout, tell=tell)
    if json:
        print_json({"endpoint": endpoint, "ended": "with the replay"})
    tell("the replay is over")
