"""Runs on the node as long as a connection: starts a run unless it lives, and tells its events.

``python -m replay_lib.remote.node_attach DIRECTORY``, with the job on stdin. It prints the mark,
then every event of the run from its first one on, a line each; an empty line now and then shows
that the connection lives. It ends after the last event, or with ``{"event": "lost"}`` where the run
died. Nothing of the run depends on it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from replay_lib.remote.node_files import EVENTS, JOB, LOCK, LOG, WORK
from replay_lib.writing import replace_file

MARK = "spike-replay-events"
_LOOK_SECONDS = 0.1
_ALIVE_SECONDS = 5.0  # an empty line at least so often
_LOG_TAIL = 2000  # bytes of the log, told where a run died
_LAST = (b'{"event": "value"', b'{"event": "error"')


def main(directory: Path) -> int:
    """See the module."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / WORK).mkdir(exist_ok=True)
    if not (directory / JOB).exists():
        replace_file(directory / JOB, sys.stdin.buffer.read())
    os.write(1, f"{MARK}\n".encode())
    started = None if _over(directory) or _alive(directory) else _start(directory)
    for line in _events(directory, started):
        os.write(1, line)
    return 0


def _over(directory: Path) -> bool:
    file = directory / EVENTS
    return file.exists() and any(line.startswith(_LAST) for line in file.open("rb"))


def _alive(directory: Path) -> bool:
    """Whether a process holds the run's lock."""
    with (directory / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _start(directory: Path) -> subprocess.Popen[bytes]:
    """A session of its own: the end of this connection is not its end."""
    _cut_unfinished(directory / EVENTS)
    with (directory / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "replay_lib.remote.node_run", str(directory)],
            cwd=directory / WORK,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _cut_unfinished(file: Path) -> None:
    """Drop what follows the last newline: whoever wrote it died."""
    if file.exists() and not (content := file.read_bytes()).endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)


def _events(directory: Path, started: subprocess.Popen[bytes] | None) -> Iterator[bytes]:
    """Lines of the events as they are written, whole ones alone; empty ones between."""
    told, rest, spoken = 0, b"", time.monotonic()
    while True:
        # first whether it lives, then what it wrote: nothing of its last words is missed
        lives = (started is not None and started.poll() is None) or _alive(directory)
        content = _from(directory / EVENTS, told)
        told += len(content)
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            yield line + b"\n"
            spoken = time.monotonic()
            if line.startswith(_LAST):
                return
        if not lives and not content:
            yield _lost(directory)
            return
        if time.monotonic() - spoken > _ALIVE_SECONDS:
            yield b"\n"
            spoken = time.monotonic()
        time.sleep(_LOOK_SECONDS)


def _from(file: Path, offset: int) -> bytes:
    if not file.exists():
        return b""
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read()


def _lost(directory: Path) -> bytes:
    log = _from(directory / LOG, 0)[-_LOG_TAIL:].decode("utf-8", "replace")
    return json.dumps({"event": "lost", "log": log}).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
