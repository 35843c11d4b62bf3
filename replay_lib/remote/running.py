"""Start a run on a node, or attach to it, and follow it to its end."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from replay_lib.errors import NodeError
from replay_lib.remote import node_files
from replay_lib.remote.job import LAST, Document, Job
from replay_lib.remote.node_attach import MARK
from replay_lib.remote.probe import Facts
from replay_lib.remote.shell import Node, last_words, quoted

#: Without a byte for so long the connection is taken for broken; the node speaks every 5 seconds.
SILENCE_SECONDS = 60.0
_STOP_SECONDS = 60  # a worker in the middle of a kernel ends when that has ended
_LOG_BYTES = 16 << 20


@dataclass(frozen=True)
class Run:
    """A job on a node that has all it needs."""

    node: Node
    facts: Facts
    job: Job

    @property
    def directory(self) -> str:
        """Where it runs; removed once its end was brought back."""
        return f"{self.facts.directory}/runs/{self.job.name}"

    def follow(self, kept: Path | None) -> Iterator[Document]:
        """Start it unless it lives or has ended, then every event from its first to its last one.

        Lines go into the file ``kept`` too. NodeError where the connection breaks (the run goes
        on there) or the run died.
        """
        for line in self._lines():
            event: Document = json.loads(line)
            if event["event"] == "lost":
                raise NodeError(_died(self.node, event["log"]))
            if kept is not None:
                with kept.open("ab") as file:
                    file.write(line + b"\n")
            yield event
            if event["event"] in LAST:
                return

    def log(self) -> bytes:
        """What run and workers printed, the end of it."""
        file = quoted(f"{self.directory}/{node_files.LOG}")
        return self.node.attempt(f"tail -c {_LOG_BYTES} -- {file}").stdout

    def clean(self) -> None:
        """Remove the run's directory; snapshots and code stay for the next one."""
        self.node.run(f"rm -rf -- {quoted(self.directory)}")

    def stop(self) -> None:
        """End the run there and remove it; NodeError tells how where that cannot be done."""
        script = f"""
cd {quoted(self.directory)} 2>/dev/null || exit 0
if ! flock -n {node_files.LOCK} true; then
    kill -TERM "$(tail -n 1 {node_files.LOCK})"
    flock -w {_STOP_SECONDS} {node_files.LOCK} true || exit 1
fi
rm -rf -- {quoted(self.directory)}
"""
        try:
            self.node.run(script, seconds=2 * _STOP_SECONDS)
        except NodeError as error:
            raise NodeError(
                f"{error}. The run may go on there: repeat the command to attach to it, or end it "
                f"with kill $(tail -n 1 {quoted(self.directory)}/{node_files.LOCK}) on the node"
            ) from error

    def _script(self) -> str:
        places = ":".join(self.job.path)
        return (
            f"cd {quoted(self.facts.directory)} || exit 1\n"
            f"PYTHONPATH={quoted(places)}${{PYTHONPATH:+:$PYTHONPATH}}; export PYTHONPATH\n"
            "PYTHONDONTWRITEBYTECODE=1; export PYTHONDONTWRITEBYTECODE\n"
            f"exec {quoted(self.facts.python)} -m replay_lib.remote.node_attach "
            f"{quoted(self.directory)}\n"
        )

    def _lines(self) -> Iterator[bytes]:
        """Lines that follow the mark, empty ones left out; NodeError where they break off."""
        with tempfile.TemporaryFile() as errors:
            with subprocess.Popen(
                self.node.command(self._script()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            ) as running:
                try:
                    yield from _after_mark(running, self.job.model_dump_json().encode())
                finally:
                    running.kill()
            code = running.returncode
            errors.seek(0)
            said = last_words(errors.read())
        raise NodeError(
            f"node {self.node.told}: the connection was lost ({self.node.ssh[0]} ended with "
            f"{code}: {said}). The run goes on there: repeat the command, and it takes up what is "
            "missing"
        )


def _after_mark(running: subprocess.Popen[bytes], given: bytes) -> Iterator[bytes]:
    assert running.stdin is not None
    assert running.stdout is not None
    with suppress(BrokenPipeError), running.stdin:
        running.stdin.write(given)
    begun = False
    for line in _lines_of(running.stdout.fileno()):
        if begun and line:
            yield line
        begun = begun or line == MARK.encode()


def _lines_of(handle: int) -> Iterator[bytes]:
    """Whole lines, until the end or a silence."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while selector.select(SILENCE_SECONDS):
            chunk = os.read(handle, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines


def _died(node: Node, log: str) -> str:
    lines: Sequence[str] = log.strip().splitlines()
    told = "\n".join(lines[-10:]) or "nothing"
    return (
        f"node {node.told}: the run died there (killed, or out of memory). Repeat the command: "
        f"what has ended is not replayed again. Its log ends with:\n{told}"
    )
