"""Another node's side: start ranks when node 0 says so, tell how they ended, leave with it.

This machine has no experiments of its own. No torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_lib.engine.job import WORKER, Job, Place, new_home, start_job
from replay_lib.engine.machine import cuda_devices
from replay_lib.engine.nodes import (
    JOIN_TIMEOUT_S,
    Ended,
    Hello,
    Start,
    Wire,
    checked_timeout,
    read_as,
    read_endpoint,
)
from replay_lib.engine.versions import versions
from replay_lib.errors import EngineError, UsageError

#: Ranks leave by themselves when a session is over; those that do not are ended.
LEAVE_S = 10.0
LOG_BYTES = 1 << 16


@dataclass
class _Running:
    start: Start
    job: Job
    told: int = 0  # ranks whose last words were passed on
    over: bool = False


def join(
    endpoint: str,
    node_rank: int | None = None,
    *,
    timeout_s: float = JOIN_TIMEOUT_S,
    tell: Callable[[str], None] = lambda _line: None,
    worker_module: str = WORKER,
) -> None:
    """Be one of the machines of a replay at ``endpoint`` until that is over.

    ``node_rank``: this machine's number, from 1 on (None: the next that is free). ``tell`` gets a
    line for whoever watches. Raises UsageError where node 0 does not take this machine, and
    EngineError where it is not there in ``timeout_s``, is gone without a word, or ended with an
    error, which every node then tells.
    """
    address, port = read_endpoint(endpoint)
    wire = _connected(address, port, checked_timeout(timeout_s))
    running: _Running | None = None
    try:
        hello = Hello(
            name=socket.gethostname(),
            node_rank=node_rank,
            gpus=cuda_devices(),
            versions=versions(),
        )
        wire.send(**hello.model_dump())
        tell(f"at {endpoint}; waiting for the other nodes")
        while True:
            message = wire.take(0.2)
            if message is None:
                if not wire.open:
                    raise EngineError(
                        f"the node that replays, {endpoint}, is gone without a word: its command "
                        "was killed, or the connection to it broke"
                    )
                if running is not None:
                    _tell_an_end(wire, running)
                continue
            op = message.get("op")
            if op in ("start", "stop"):
                _leave(running)
                running = None
            if op == "start" and (start := read_as(Start, message)) is not None:
                running = _start(start, address, worker_module)
                tell(f"session {start.session}: {start.ranks} rank(s) on {start.device}")
            elif op == "stop":
                tell("the session is over")
            elif op == "welcome":
                tell(f"node {message.get('node_rank')} of {message.get('nnodes')}")
            elif op == "refused":
                raise UsageError(f"{endpoint} does not take this machine: {message.get('why')}")
            elif op == "bye":
                _say_goodbye(message)
                return
    finally:
        wire.close()
        _leave(running, 0.0)


def _connected(host: str, port: int, timeout_s: float) -> Wire:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Wire(socket.create_connection((host, port), timeout=5))
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"nobody at {host}:{port} within {timeout_s:g} s ({error}): node 0 runs the "
                    f"replay itself, with --nnodes and --rdzv-endpoint {host}:{port}"
                ) from error
        time.sleep(0.25)


def _start(start: Start, address: str, module: str) -> _Running:
    place = Place(nnodes=start.nnodes, node_rank=start.node_rank, address=address, port=start.port)
    job = start_job(
        new_home(),
        device=start.device,
        ranks=start.ranks,
        module=module,
        place=place,
        ends_with_us=True,
    )
    return _Running(start, job)


def _tell_an_end(wire: Wire, running: _Running) -> None:
    """Pass last words on as they come, and the end of a job that ended by itself, once."""
    if running.over:
        return
    home, code = running.job.home, running.job.process.poll()
    words = _last_words(home)
    running.over = code is not None
    if not running.over and len(words) == running.told:
        return
    running.told = len(words)
    log = _end_of(home / "log") if running.over else ""
    wire.send(**Ended(session=running.start.session, code=code, words=words, log=log).model_dump())


def _last_words(home: Path) -> dict[int, tuple[float, str]]:
    now = time.time()
    found: dict[int, tuple[float, str]] = {}
    for file in home.glob("error_rank*.json"):
        text = file.read_text(errors="replace")
        with contextlib.suppress(ValueError):  # half-written: the next look has it
            json.loads(text)
            rank = int(file.stem.removeprefix("error_rank"))
            found[rank] = now - file.stat().st_mtime, text
    return found


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")


def _leave(running: _Running | None, patience_s: float = LEAVE_S) -> None:
    if running is not None:
        running.job.wait_for_ranks(patience_s)
        shutil.rmtree(running.job.home, ignore_errors=True)


def _say_goodbye(message: dict[str, Any]) -> None:
    if message.get("error"):
        raise EngineError(f"the replay ended with an error on node 0: {message['error']}")
