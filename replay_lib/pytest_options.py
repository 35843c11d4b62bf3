"""Options of the pytest plugin, and what replays them. No torch at import."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_lib.engine.layout import AUTO, read_ranks
from replay_lib.engine.nodes import JOIN_TIMEOUT_S, Nodes
from replay_lib.errors import UsageError
from replay_lib.run import BACKENDS, LEAST_REPEATS, NATIVE, ReplayOptions


def add_options(group: pytest.OptionGroup) -> None:
    """All options, into ``group``."""
    group.addoption(
        "--spike-cases",
        metavar="DIR",
        type=Path,
        help="directory of cases, one DIR/*/case.yaml each [default: spike_cases in the rootdir]",
    )
    group.addoption(
        "--mitigations",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="directory with mitigations beside the built-in ones; may be repeated",
    )
    group.addoption(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where tests without the gpu marker replay [default: auto]",
    )
    group.addoption(
        "--layout",
        metavar="AXES",
        default=AUTO,
        help="ranks that replay, as in tp=2 or ep=2,dp=2 [default: auto, one where it is enough]",
    )
    group.addoption(
        "--dp-ranks",
        metavar="N,N,...",
        help="replay these recorded data-parallel ranks only, with baselines of their own",
    )
    group.addoption(
        "--nnodes",
        metavar="N",
        type=int,
        default=1,
        help="machines that replay together; the others run spike-replay join [default: 1]",
    )
    group.addoption(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="with --nnodes: an address of this machine, and a free port",
    )
    group.addoption(
        "--join-timeout",
        metavar="SECONDS",
        type=float,
        default=JOIN_TIMEOUT_S,
        help=f"how long the machines wait for each other [default: {JOIN_TIMEOUT_S:g}]",
    )
    group.addoption(
        "--trainer",
        metavar="NAME",
        help="whose loss is replayed: grpo, axrl or module:factory [default: the backend's own]",
    )
    group.addoption(
        "--backend",
        default=NATIVE,
        choices=BACKENDS,
        help="what replays: this library's engine, or AXRL's own worker [default: native]",
    )
    group.addoption(
        "--repeats",
        metavar="N",
        type=int,
        default=LEAST_REPEATS,
        help="replay the baseline N times; the spread of its norm enters the noise band "
        f"[default: {LEAST_REPEATS}]",
    )
    group.addoption(
        "--update-baselines",
        action="store_true",
        help="write the figures of this run as baselines; a run that writes any fails",
    )
    group.addoption(
        "--spike-results",
        metavar="DIR",
        type=Path,
        help="keep outcomes, results and a report in this folder (spike-replay merge reads it)",
    )
    group.addoption(
        "--spike-task",
        metavar="JOB",
        help="keep every replay in the ledger of this task [default: that of a case's snapshot]",
    )
    group.addoption(
        "--shard",
        metavar="I/N",
        help="run the I-th of N parts of the tests; a case is never split",
    )
    group.addoption(
        "--require-device",
        action="store_true",
        help="a test whose device is missing fails; without this it is skipped",
    )
    group.addoption(
        "--require-cases",
        action="store_true",
        help="fail if no case or no snapshot is there; without this such tests are skipped",
    )


def options_of(config: pytest.Config) -> ReplayOptions:
    """How the command line asks for replays; UsageError where it cannot."""
    return ReplayOptions(
        mitigations=tuple(config.getoption("--mitigations")),
        layout=config.getoption("--layout"),
        nodes=_nodes(config),
        dp_ranks=read_ranks(config.getoption("--dp-ranks")),
        trainer=config.getoption("--trainer"),
        repeats=config.getoption("--repeats"),
        backend=config.getoption("--backend"),
    )


def _nodes(config: pytest.Config) -> Nodes | None:
    """The machines of this run: one process of it meets the others."""
    nodes = Nodes.of(
        config.getoption("--nnodes"),
        config.getoption("--rdzv-endpoint"),
        config.getoption("--join-timeout"),
    )
    if nodes is not None and getattr(config.option, "numprocesses", None):
        raise UsageError("--nnodes: found -n beside it, expected one process: leave -n out")
    return nodes
