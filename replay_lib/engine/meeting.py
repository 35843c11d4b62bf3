"""Node 0's side of several machines: wait for them, start their ranks, hear how those ended.

One meeting serves all sessions of a process, whose other machines stay until it is over
(:func:`part`). No torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from replay_lib.engine.job import Place
from replay_lib.engine.nodes import (
    ENDPOINT,
    Ended,
    Hello,
    Nodes,
    Start,
    Wire,
    join_command,
    reachable_address,
    read_as,
)
from replay_lib.engine.versions import versions
from replay_lib.errors import EngineError, UsageError, fault

#: After a job has ended: how long its other machines may take to tell why.
TELL_S = 20.0
#: A connection that has not said hello by then is none of ours.
HELLO_S = 10.0


@dataclass
class Guest:
    """Another machine; ``node_rank`` once everybody is there, ``ended`` in the present session."""

    wire: Wire
    hello: Hello
    node_rank: int = 0
    ended: Ended | None = None
    ended_at: float = 0.0  # when that was heard, in seconds of this machine's clock

    @property
    def name(self) -> str:
        """For a reader; the machine told it, so it is quoted."""
        return f"node {self.node_rank} ({self.hello.name!r:.60})"


@dataclass
class Meeting:
    """The machines of this process; ``lost`` is the error that ended it for good."""

    nodes: Nodes
    listener: socket.socket
    address: str
    guests: list[Guest] = field(default_factory=list)
    complete: bool = False
    session: int = 0
    running: bool = False
    lost: str | None = None
    failed: str | None = None  # what ended the last session

    def gather(self) -> None:
        """Wait until every machine is there, once; EngineError that says who is missing or gone."""
        if self.complete:
            self.trouble()
            if self.lost is not None:
                raise EngineError(self.lost)
            return
        deadline = time.monotonic() + self.nodes.timeout_s
        strangers: list[Wire] = []
        self.listener.settimeout(0.1)
        while len(self.guests) < self.nodes.number - 1:
            with contextlib.suppress(TimeoutError):
                strangers.append(Wire(self.listener.accept()[0]))
            strangers = [wire for wire in strangers if not self._greeted(wire)]
            self.guests = [guest for guest in self.guests if _is_there(guest)]
            if time.monotonic() > deadline:
                break
        for wire in strangers:
            wire.close()
        if len(self.guests) < self.nodes.number - 1:
            raise EngineError(self._missing())
        self._number()
        self.complete = True

    def _greeted(self, wire: Wire) -> bool:
        """Whether ``wire`` is settled: a guest, refused or gone."""
        document = wire.take()
        if document is None:
            if not wire.open or time.monotonic() - wire.silent_since > HELLO_S:
                wire.close()
            return not wire.open
        hello = read_as(Hello, document)
        why = "no hello of this program" if hello is None else self._unfit(hello)
        if hello is None or why is not None:
            wire.send("refused", why=why)
            wire.close()
        else:
            self.guests.append(Guest(wire, hello))
        return True

    def _unfit(self, hello: Hello) -> str | None:
        other = [
            f"{name} {hello.versions.get(name)} there, {mine} on node 0"
            for name, mine in versions().items()
            if hello.versions.get(name) != mine
        ]
        if other:
            return f"other versions: {'; '.join(other)}"
        if hello.node_rank is None:
            return None
        if not 1 <= hello.node_rank < self.nodes.number:
            return (
                f"--node-rank {hello.node_rank}: expected 1 to {self.nodes.number - 1}; node 0 is "
                "where the replay runs"
            )
        if any(guest.hello.node_rank == hello.node_rank for guest in self.guests):
            return f"--node-rank {hello.node_rank}: another machine has come under that number"
        return None

    def _number(self) -> None:
        """Who named no number takes those that are left, in the order of arrival."""
        wanted = {g.hello.node_rank for g in self.guests}
        left = iter(n for n in range(1, self.nodes.number) if n not in wanted)
        for guest in self.guests:
            named = guest.hello.node_rank
            guest.node_rank = next(left) if named is None else named
            guest.wire.send("welcome", node_rank=guest.node_rank, nnodes=self.nodes.number)
        self.guests.sort(key=lambda guest: guest.node_rank)

    def _missing(self) -> str:
        came = [f"{guest.hello.name!r:.60}" for guest in self.guests]
        named = {guest.hello.node_rank for guest in self.guests} - {None}
        absent = self.nodes.number - 1 - len(came)
        who = [f"node {n}" for n in range(1, self.nodes.number) if n not in named]
        missing = ", ".join(who) if len(who) == absent else f"{absent} of {', '.join(who)}"
        return (
            f"{len(came) + 1} of {self.nodes.number} nodes came to {self.nodes.endpoint} within "
            f"{self.nodes.timeout_s:g} s; missing: {missing}; came: "
            f"{', '.join(['this machine', *came])}. Start on each that is missing: "
            f"{join_command(self.nodes.endpoint)}"
        )

    def start(self, device: str, ranks: int) -> tuple[Place, int]:
        """Begin a session of ``ranks`` in all: this machine's place in it, and its ranks.

        Waits for the other machines where they are not there yet. EngineError, UsageError.
        """
        each = ranks // self.nodes.number
        self.gather()
        self.failed = None
        for guest in self.guests:
            if device == "cuda" and guest.hello.gpus < each:
                raise UsageError(
                    f"{guest.name}: it has {guest.hello.gpus} NVIDIA device(s), and {ranks} ranks "
                    f"on {self.nodes.number} nodes need {each} on each, one a rank"
                )
        place = Place(
            nnodes=self.nodes.number, node_rank=0, address=self.address, port=self._free_port()
        )
        self.session += 1
        self.running = True
        for guest in self.guests:
            guest.ended = None
            start = Start(
                session=self.session,
                nnodes=self.nodes.number,
                node_rank=guest.node_rank,
                device="cuda" if device == "cuda" else "cpu",
                ranks=each,
                port=place.port,
            )
            guest.wire.send(**start.model_dump())
        return place, each

    def _free_port(self) -> int:
        with socket.socket(self.listener.family) as free:
            free.bind((self.address, 0))
            return int(free.getsockname()[1])

    def trouble(self) -> bool:
        """Whether a machine is gone, or its ranks ended, while the session runs."""
        for guest in self.guests:
            document = guest.wire.take()
            told = None if document is None else read_as(Ended, document)
            if told is not None and told.session == self.session:
                guest.ended, guest.ended_at = told, time.time()
            if not guest.wire.open and self.lost is None:
                self.lost = (
                    f"{guest.name} is gone: its spike-replay join was ended, or the connection to "
                    "it broke; the other nodes ended with it"
                )
        ended = any(guest.ended is not None for guest in self.guests)
        return self.running and (ended or self.lost is not None)

    def collect(self, home: Path) -> None:
        """Put what the other machines' ranks left behind beside this machine's, in ``home``."""
        deadline = time.monotonic() + TELL_S
        while self.running and time.monotonic() < deadline:
            self.trouble()
            if all(_has_told_all(guest) for guest in self.guests):
                break
            time.sleep(0.1)
        for guest in self.guests:
            if guest.ended is not None:
                _write_down(home, guest.node_rank, guest.ended, guest.ended_at)

    def stop(self) -> None:
        """End the session on the other machines."""
        if self.running:
            for guest in self.guests:
                guest.wire.send("stop", session=self.session)
        self.running = False

    def close(self) -> None:
        """Let the other machines go, with the error that ended the last session, if one did."""
        self.stop()
        for guest in self.guests:
            guest.wire.send("bye", error=self.lost or self.failed)
            guest.wire.close()
        self.guests.clear()
        self.listener.close()


def _is_there(guest: Guest) -> bool:
    guest.wire.take()  # nothing is said before the first session; an end is noticed
    if not guest.wire.open:
        guest.wire.close()
    return guest.wire.open


def _has_told_all(guest: Guest) -> bool:
    over = guest.ended is not None and guest.ended.code is not None
    return over or not guest.wire.open


def _write_down(home: Path, node: int, ended: Ended, heard: float) -> None:
    for rank, (age, word) in ended.words.items():
        file = home / f"error_rank{rank}.json"
        if not file.exists():
            file.write_text(word)
            os.utime(file, (heard - age, heard - age))  # the first error is told
    if ended.log:
        (home / f"log_node{node}").write_text(ended.log)


_MEETINGS: dict[Nodes, Meeting] = {}


def meeting_of(nodes: Nodes) -> Meeting:
    """This process's meeting at the endpoint of ``nodes``, opened when first asked for."""
    if nodes not in _MEETINGS:
        family, address = reachable_address(nodes.host, nodes.port)
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            found = f"{nodes.endpoint}, which cannot be listened at ({error.strerror})"
            expected = "an address of this machine and a free port"
            raise UsageError(fault(ENDPOINT, None, found, expected)) from error
        listener.listen(64)
        _MEETINGS[nodes] = Meeting(nodes, listener, str(address[0]))
    return _MEETINGS[nodes]


def part() -> None:
    """End all meetings of this process: its other machines go. Safe to call twice."""
    while _MEETINGS:
        _MEETINGS.popitem()[1].close()
