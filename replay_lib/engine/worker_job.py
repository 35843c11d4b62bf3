"""One worker job as its parent sees it: started, spoken to line by line, and ended.

Whatever ends it (a rank that died, a hang, another machine that left) is one error that says why.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from typing import Any

from replay_lib.engine.endings import log_end, named_error, why_it_ended
from replay_lib.engine.job import Job, new_home, start_job
from replay_lib.engine.meeting import Meeting, meeting_of
from replay_lib.engine.nodes import Nodes
from replay_lib.errors import EngineError, SpikeReplayError

#: Starting takes 12 to 15 s on a GPU node and loading is bound by the disk; a hang is longer.
START_TIMEOUT_S = 600.0

#: After a rank has failed torchrun ends the others (30 s for those that do not listen) and reports.
REPORT_TIMEOUT_S = 45.0
#: ... for which it gets so long where another node has told already that it is over.
SHORT_REPORT_S = 5.0
#: Ranks that are asked to end get so long.
CLOSE_TIMEOUT_S = 10.0


class WorkerJob:
    """A torchrun job and the socket to its rank 0; ``meeting`` has the job's other machines."""

    def __init__(self, job: Job, listener: socket.socket, meeting: Meeting | None) -> None:
        self.job = job
        self.process = job.process
        self.home = job.home
        self.listener = listener
        self.meeting = meeting
        self.connection: socket.socket | None = None
        self.pending = b""

    @classmethod
    def start(cls, device: str, ranks: int, module: str, nodes: Nodes | None = None) -> WorkerJob:
        meeting, place = (None if nodes is None else meeting_of(nodes)), None
        if meeting is not None:
            place, ranks = meeting.start(device, ranks)
        home = new_home()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(home / "channel"))
        listener.listen(1)
        job = start_job(home, device=device, ranks=ranks, module=module, place=place)
        return cls(job, listener, meeting)

    def with_nodes(self, info: dict[str, Any]) -> dict[str, Any]:
        """What the worker told of itself, with the machines that it could not know of."""
        if self.meeting is None:
            return info
        others = ", ".join(guest.name for guest in self.meeting.guests)
        note = f"replayed on {self.meeting.nodes.number} nodes: this one and {others}"
        return info | {"notes": [*info.get("notes", ()), note]}

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._connected(START_TIMEOUT_S).sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            gone = EngineError(f"the worker is gone ({error}).{self._log_end()}")
            raise self._why() or gone from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next event; an ``error`` event is raised as the error it names."""
        line = self._read_line(time.monotonic() + timeout_s, timeout_s)
        reply: dict[str, Any] = json.loads(line)
        if reply["event"] == "error":
            raise self._named(reply)
        return reply

    def _named(self, reply: dict[str, Any]) -> SpikeReplayError:
        """The error that ended a request: where the job ended too, what ended the job."""
        return named_error(reply) if reply["answered"] else self._why() or named_error(reply)

    def _why(self) -> SpikeReplayError | None:
        """What ended the job, once torchrun has made its report, and other machines theirs."""
        elsewhere = self.meeting is not None and self.meeting.trouble()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=SHORT_REPORT_S if elsewhere else REPORT_TIMEOUT_S)
        if self.meeting is None:
            return why_it_ended(self.home)
        self.meeting.collect(self.home)
        found = why_it_ended(self.home, self.meeting.lost)
        self.meeting.failed = str(found or f"the worker ended unexpectedly.{self._log_end()}")
        self.meeting.stop()
        return found

    def _connected(self, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        self.listener.settimeout(0.2)
        while self.connection is None:
            with contextlib.suppress(TimeoutError):
                self.connection = self.listener.accept()[0]
            self._check(deadline, timeout_s)
        return self.connection

    def _read_line(self, deadline: float, timeout_s: float) -> bytes:
        connection = self._connected(timeout_s)
        connection.settimeout(0.5)
        while b"\n" not in self.pending:
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                self._check(deadline, timeout_s)
                continue
            except OSError:
                data = b""
            if not data:
                raise self._ended()
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def _ended(self) -> SpikeReplayError:
        return self._why() or EngineError(f"the worker ended unexpectedly.{self._log_end()}")

    def _check(self, deadline: float, timeout_s: float) -> None:
        if self.meeting is not None and self.meeting.trouble():
            why = self._ended()
            self._kill()
            raise why
        if self.process.poll() is not None and self.connection is None:
            raise EngineError(
                f"the worker ended with status {self.process.returncode} before it could "
                f"answer.{self._log_end()}"
            )
        if time.monotonic() > deadline:
            self._kill()
            raise EngineError(
                f"the worker said nothing for {timeout_s:.0f} s and was ended.{self._log_end()}"
            )

    def _kill(self) -> None:
        self.job.end()
        if self.meeting is not None:
            self.meeting.stop()

    def _log_end(self) -> str:
        return log_end(self.home)

    def stop(self) -> None:
        """Ask the worker to end, wait a little, then end it; removes its files."""
        if self.connection is not None and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.connection.sendall(b'{"op": "close"}\n')
            if self.meeting is not None:
                self.job.wait_for_ranks(CLOSE_TIMEOUT_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=CLOSE_TIMEOUT_S)
        if self.process.poll() is None:
            self._kill()
        if self.meeting is not None:
            self.meeting.stop()
        if self.connection is not None:
            self.connection.close()
        self.listener.close()
        shutil.rmtree(self.home, ignore_errors=True)
