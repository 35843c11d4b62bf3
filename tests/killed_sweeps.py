"""Sweeps that are killed at random: a preloaded process that forks them. Run by a test.

    python killed_sweeps.py DIRECTORY SNAPSHOT KILLS

Each sweep writes its progress to DIRECTORY/<pid>.err. Prints the pids of those that were killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import fake_engine

from replay_lib import run
from replay_lib.cli import main
from replay_lib.engine.protocol import Experiment, Outcome

LINES = 14  # of a whole sweep's progress: each is the last one of some
METHODS = ("balance-negative-advantages", "clip-advantages", "disable-routing-replay")


class Slow(fake_engine.FakeEngine):
    """Takes a moment for each experiment, so that kills fall between them."""

    def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
        for outcome in super().run_many(experiments):
            time.sleep(0.01)
            yield outcome


def sweep(snapshot: str) -> None:
    with contextlib.suppress(SystemExit):
        main(["sweep", snapshot, *METHODS, "--combine", "2", "--task", "job"])


def child(directory: Path, snapshot: str) -> None:
    os.nice(10)  # whoever kills it has to be faster, on a loaded machine too
    told = os.open(directory / f"{os.getpid()}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(told, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
    sweep(snapshot)


def wait_for(told: Path, lines: int, pid: int) -> None:
    """Until ``told`` has so many lines, or the process is over."""
    while not (told.exists() and told.read_bytes().count(b"\n") >= lines):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.002)


def kill_some(directory: Path, snapshot: str, kills: int) -> None:
    os.chdir(directory)
    run.open_engine = Slow
    sweep(snapshot)  # everything is imported by now
    chance = random.Random(85)
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            child(directory, snapshot)
            os._exit(0)
        # by how far it came and not by the clock: a loaded machine is slower
        wait_for(directory / f"{pid}.err", chance.randrange(LINES + 1), pid)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(f"killed {pid}", flush=True)


if __name__ == "__main__":
    kill_some(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
