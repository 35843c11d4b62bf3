"""What tests know of their node, and helpers to start it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest


@dataclass(frozen=True)
class Loopback:
    """``ssh`` is what ``--ssh`` takes, ``directory`` for ``--remote-dir``, ``python`` an
    interpreter whose engine is the fake one; ``log`` is what that engine does."""

    ssh: str
    directory: Path
    python: Path
    log: Path
    sshd: int

    @property
    def options(self) -> list[str]:
        return [
            f"--ssh={self.ssh}",
            f"--remote-dir={self.directory}",
            f"--remote-python={self.python}",
        ]

    def ran(self) -> list[str]:
        """Experiments that the fake engine replayed, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split()[2] for line in lines if line.split()[1] == "run"]

    def set(self, **variables: object) -> None:
        """Variables of the environment of every run from now on."""
        lines = [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
        (self.python.parent / "more").write_text("\n".join(lines) + "\n")

    @property
    def runs(self) -> list[Path]:
        """Directories of runs that go on, or whose end nobody has brought back."""
        return sorted((self.directory / "runs").glob("*"))

    def cut(self) -> None:
        """End every connection to the server: its children, not itself."""
        for child in psutil.Process(self.sshd).children():
            for each in (*child.children(), child):
                if "sshd" in each.name():
                    each.send_signal(signal.SIGKILL)


def ssh(home: Path, port: int) -> str:
    options = ["StrictHostKeyChecking=no", f"UserKnownHostsFile={home}/known", "BatchMode=yes"]
    words = ["ssh", "-F", "none", "-q", "-p", str(port), "-i", str(home / "user")]
    words += [word for option in options for word in ("-o", option)]
    return shlex.join([*words, "127.0.0.1"])


def found(name: str) -> str | None:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(200):
        if server.poll() is not None:
            pytest.skip(f"sshd does not start here: {log.read_text()[-300:]}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("sshd did not listen within 10 s")
