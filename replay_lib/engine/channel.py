"""What a rank of a worker job and its parent tell each other: lines of JSON, errors as data."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from replay_lib.errors import EngineError

CHANNEL = "SPIKE_REPLAY_CHANNEL"  # path of the parent's socket
DEVICE = "SPIKE_REPLAY_DEVICE"  # cpu or cuda


class Channel:
    """Lines of JSON to and from the parent; on ranks other than 0 writing does nothing."""

    def __init__(self, path: str, rank: int) -> None:
        self.stream = None
        if rank == 0:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            self.stream = connection.makefile("rw", encoding="utf-8")

    def send(self, event: str, **values: Any) -> None:
        """Write one event."""
        if self.stream is not None:
            self.stream.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")
            self.stream.flush()

    def requests(self, comm: Any) -> Iterator[dict[str, Any]]:
        """Requests until the parent closes, the same on every rank."""
        while True:
            line = self.stream.readline() if self.stream is not None else ""
            text: str = comm.broadcast(line)
            if not text:
                return
            yield json.loads(text)


def die_with_parent() -> None:
    """Ask Linux to end this process when torchrun ends, however that happens.

    A torchrun that is killed takes no leave of its ranks, and a rank that hangs would stay behind.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def tell_exits() -> None:
    """Make ``os._exit`` leave a word first: it takes no leave, and other ranks only miss a peer."""
    leave, owner = os._exit, os.getpid()
    rank = os.environ.get("RANK", "0")

    def told(status: int) -> NoReturn:
        if os.getpid() == owner:  # a forked child of this rank may end as it likes
            caller = traceback.extract_stack(limit=2)[0]
            leave_word(
                EngineError(
                    f"the worker's rank {rank} ended itself with exit code {status}: os._exit was "
                    f"called in {caller.name} ({caller.filename}, line {caller.lineno}); the other "
                    "ranks ended with it. A patch or a trainer returns or raises"
                )
            )
        leave(status)

    os._exit = told


def leave_word(error: BaseException) -> None:
    """Write what this rank met beside the channel: the parent shows the first rank's error."""
    rank = os.environ.get("RANK", "0")
    path = Path(os.environ[CHANNEL]).with_name(f"error_rank{rank}.json")
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(describe_error(error)))


def describe_error(error: BaseException) -> dict[str, str]:
    """Code and message of ``error``; one that nobody raised on purpose brings its traceback."""
    from replay_lib.errors import SpikeReplayError

    if isinstance(error, SpikeReplayError):
        return {"code": error.code, "message": str(error)}
    last = traceback.format_exception(error)
    return {"code": "engine", "message": f"{_reason(error)}\n{''.join(last)}"}


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return "out of memory on the device: replay fewer ranks, or use a larger device"
    return f"the worker met an unexpected {name}: {error}"
