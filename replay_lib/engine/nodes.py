"""Several machines that replay together: how they are named, and what they tell each other.

Node 0 is where the command runs that replays; every other machine runs ``spike-replay join``. They
meet at ``host:port`` of node 0 and exchange one JSON document a line: ``hello`` from a machine,
``welcome`` or ``refused`` to it, then for each session ``start`` and ``stop``, or ``ended`` where
its ranks did so by themselves, and at last ``bye``. Needs no torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from replay_lib.engine.protocol import Frozen
from replay_lib.errors import UsageError, fault

#: How long machines wait for each other: a scheduler starts them together, or nearly so.
JOIN_TIMEOUT_S = 600.0
#: A document longer than this is none of ours (a report holds 64 KiB of a log, and errors).
LONGEST = 1 << 22
ENDPOINT = "--rdzv-endpoint"
_M = TypeVar("_M", bound=Frozen)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """``number`` machines that meet at ``host:port`` within ``timeout_s``."""

    number: int
    host: str
    port: int
    timeout_s: float = JOIN_TIMEOUT_S

    @classmethod
    def of(
        cls, number: int, endpoint: str | None, timeout_s: float = JOIN_TIMEOUT_S
    ) -> Nodes | None:
        """From a command line; None for one machine. UsageError for what contradicts itself."""
        if number < 1:
            raise UsageError(f"--nnodes: found {number}, expected 1 or more machines")
        if number == 1 and endpoint is None:
            return None
        if number == 1 or endpoint is None:
            given, lacking = ("--nnodes", ENDPOINT) if endpoint is None else (ENDPOINT, "--nnodes")
            raise UsageError(
                f"{given}: found without {lacking}, expected both, as in --nnodes 2 {ENDPOINT} "
                "10.0.0.1:29400, where this machine has the address 10.0.0.1"
            )
        host, port = read_endpoint(endpoint)
        return cls(number=number, host=host, port=port, timeout_s=checked_timeout(timeout_s))

    @property
    def endpoint(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"


def checked_timeout(seconds: float) -> float:
    """``seconds`` as they are; UsageError where they are no time to wait."""
    ok = 0 < seconds < float("inf")
    if not ok:
        raise UsageError(f"--join-timeout: found {seconds:g}, expected seconds, more than 0")
    return seconds


def read_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``; UsageError where it is not that."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    digits = port.isascii() and port.isdigit()
    if not (host and digits and 1 <= int(port) <= 65535):
        expected = "host:port of the machine that replays, as in 10.0.0.1:29400"
        raise UsageError(fault(ENDPOINT, None, repr(text), expected))
    return host, int(port)


def join_command(endpoint: str) -> str:
    """What every other machine runs."""
    return f"spike-replay join {ENDPOINT} {endpoint}"


def nodes_hint(devices: int, here: int) -> str:
    """What to do where ``here`` devices of one machine are too few for ``devices``."""
    if here < 1:
        return ""
    number = -(-devices // here)
    return (
        f"; over {number} such machines: --nnodes {number} {ENDPOINT} HOST:29400 here, and on each "
        f"other one {join_command('HOST:29400')} (HOST: an address of this machine)"
    )


class Hello(Frozen):
    """A machine that comes: what it has, and the number it wants (None: any)."""

    op: Literal["hello"] = "hello"
    name: Annotated[str, Field(max_length=255)]
    node_rank: int | None
    gpus: int
    versions: dict[str, str]


class Start(Frozen):
    """A session begins: how many ranks to start, and where torchrun's own rendezvous is."""

    op: Literal["start"] = "start"
    session: int
    nnodes: int
    node_rank: int
    device: Literal["cpu", "cuda"]
    ranks: Annotated[int, Field(ge=1, le=1024)]
    port: Annotated[int, Field(ge=1, le=65535)]


class Ended(Frozen):
    """A machine's ranks ended by themselves: their last words (by rank, with their age) and log.

    ``code`` is torchrun's exit code, None as long as it still ends the other ranks.
    """

    op: Literal["ended"] = "ended"
    session: int
    code: int | None
    words: dict[int, tuple[float, str]]
    log: str


class Wire:
    """Documents over one TCP connection; ``open`` until the other side is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.open = True
        self.silent_since = time.monotonic()
        self._pending = b""
        connection.setblocking(True)
        _notice_a_dead_machine(connection)

    def send(self, op: str, **values: Any) -> None:
        """Write one document; the other side may be gone."""
        try:
            self.connection.sendall(json.dumps({"op": op, **values}).encode() + b"\n")
        except OSError:
            self.open = False

    def take(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """The next document, or None where none came in ``wait_s`` or the other side is gone."""
        deadline = time.monotonic() + wait_s
        while b"\n" not in self._pending and self.open:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.connection], [], [], left)[0]:
                return None
            try:
                data = self.connection.recv(1 << 16)
            except OSError:
                data = b""
            self._pending += data
            self.open = bool(data) and len(self._pending) <= LONGEST
        line, found, self._pending = self._pending.partition(b"\n")
        if not found:
            return None
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                return document
        self.open = False  # whoever says this is none of ours
        return None

    def close(self) -> None:
        """End the connection; safe to call twice."""
        self.open = False
        self.connection.close()


def read_as(kind: type[_M], document: dict[str, Any]) -> _M | None:
    """``document`` as ``kind``; None where it is not one."""
    try:
        return kind.model_validate(document)
    except ValidationError:
        return None


def _notice_a_dead_machine(connection: socket.socket) -> None:
    """A machine that loses its power says no word: TCP is made to ask, and gives up in 30 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 30_000),  # of what was sent and never acknowledged
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reachable_address(host: str, port: int) -> tuple[int, Any]:
    """Family and address of ``host`` on this machine, where others can reach it; UsageError else.

    A name that ``/etc/hosts`` sends to the loopback device is refused: other machines would wait
    for nobody.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            fault(ENDPOINT, None, f"{host!r}, which cannot be looked up ({error})", "a host")
        ) from error
    inside = ipaddress.ip_address(address[0]).is_loopback
    meant = host == "localhost" or _is_address(host)
    if inside and not meant:
        raise UsageError(
            fault(
                ENDPOINT,
                None,
                f"{host!r}, which is {address[0]} here, where no other machine comes",
                "an address of this machine that the others reach (ip address shows them)",
            )
        )
    return family, address


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
