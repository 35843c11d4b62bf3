"""A GPU node in small: a real sshd on the loopback address, of this user, with keys of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Loopback, found, free_port, ssh, wait_for

REPO = Path(__file__).parents[2]
FAKE_SITE = Path(__file__).parent / "fake_site"


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The ssh command of a server that lives as long as the tests, and the server's pid."""
    absent = [name for name in ("sshd", "ssh", "ssh-keygen", "rsync", "flock") if not found(name)]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)} (packages openssh-server, rsync)")
    home = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True
        )
    (home / "authorized").write_bytes((home / "user.pub").read_bytes())
    port = free_port()
    (home / "config").write_text(
        f"""
Port {port}
ListenAddress 127.0.0.1
HostKey {home}/host
AuthorizedKeysFile {home}/authorized
PidFile {home}/pid
UsePAM no
StrictModes no
PasswordAuthentication no
PrintMotd no
MaxStartups 100
"""
    )
    if os.getuid() == 0:  # where root's sshd sheds its rights
        Path("/run/sshd").mkdir(exist_ok=True)
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(
            [str(found("sshd")), "-D", "-e", "-f", str(home / "config")], stderr=log
        ) as server,
    ):
        try:
            wait_for(port, server, home / "log")
            yield ssh(home, port), server.pid
        finally:
            server.terminate()


@pytest.fixture
def node(sshd: tuple[str, int], tmp_path: Path) -> Loopback:
    """A node whose names are as odd as they come."""
    home = tmp_path / 'it\'s a "node"\n$HOME'
    home.mkdir()
    python = home / "my python"
    log = tmp_path / "engine.log"
    words = {
        "FAKE_ENGINE_LOG": log,
        "FAKE_TESTS": REPO / "tests",
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in words.items()]
    lines.append(f". {shlex.quote(str(home / 'more'))}")
    lines.append(f'PYTHONPATH={shlex.quote(str(FAKE_SITE))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    lines.append(f'export PYTHONPATH; exec {shlex.quote(sys.executable)} "$@"')
    (home / "more").write_text("")
    python.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    python.chmod(0o755)
    return Loopback(sshd[0], home / "kept here", python, log, sshd[1])
