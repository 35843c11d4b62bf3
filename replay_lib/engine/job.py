"""A torchrun job on this machine: started, watched, ended. No torch.

Where several machines replay together each has one such job, and torchrun's own rendezvous joins
them (:class:`Place`). Node 0 holds rank 0, which talks to the parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from replay_lib.engine.channel import CHANNEL, DEVICE

WORKER = "replay_lib.engine.worker"


@dataclass(frozen=True, kw_only=True)
class Place:
    """This machine among the ``nnodes`` of a job; ``address:port`` is torchrun's on node 0."""

    nnodes: int
    node_rank: int
    address: str
    port: int

    @property
    def arguments(self) -> list[str]:
        """torchrun's: static rendezvous, since node 0 has to hold rank 0.

        c10d's own order of nodes is that of their addresses.
        """
        return [
            f"--nnodes={self.nnodes}",
            f"--node-rank={self.node_rank}",
            f"--master-addr={self.address}",
            f"--master-port={self.port}",
        ]


@dataclass(frozen=True)
class Job:
    """torchrun and its ranks; ``home`` is where they leave their log and last words."""

    process: subprocess.Popen[bytes]
    home: Path

    def end(self) -> None:
        """End torchrun and its ranks, which it starts in process groups of their own."""
        ranks = self._ranks()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(ranks, timeout=10)  # memory is free only when they are gone

    def wait_for_ranks(self, patience_s: float) -> None:
        """Wait so long until no rank is left, then end torchrun.

        torchrun itself waits for its like on other machines, which takes seconds and tells nothing.
        """
        deadline = time.monotonic() + patience_s
        while self._ranks() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.end()

    def _ranks(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


def new_home() -> Path:
    """A directory for the files of one job."""
    return Path(tempfile.mkdtemp(prefix="spike-replay-"))


def start_job(
    home: Path,
    *,
    device: str,
    ranks: int,
    module: str = WORKER,
    place: Place | None = None,
    ends_with_us: bool = False,
) -> Job:
    """Start ``ranks`` processes of ``module`` on this machine, alone or as one of several.

    ``ends_with_us``: the job does not outlive this process, however that ends (Linux).
    """
    torchrun = "replay_lib.engine.launch" if ends_with_us else "torch.distributed.run"
    launch = [sys.executable, "-m", torchrun]
    launch += ["--standalone"] if place is None else place.arguments
    launch += [f"--nproc-per-node={ranks}", "-m", module]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            launch,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(device, home),
            start_new_session=True,  # so that the whole job can be ended at once
        )
    return Job(process, home)


def _environment(device: str, home: Path) -> dict[str, str]:
    env = dict(os.environ)
    env[CHANNEL] = str(home / "channel")
    env[DEVICE] = device
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    # cuBLAS is deterministic only with a fixed workspace.
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env
