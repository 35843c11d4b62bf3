"""Several machines replay together: who is missing, who is gone, and the same figures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from replay_lib.engine import meeting as meeting_module
from replay_lib.engine.channel import describe_error
from replay_lib.engine.endings import why_it_ended
from replay_lib.engine.joining import join
from replay_lib.engine.meeting import Meeting, meeting_of, part
from replay_lib.engine.nodes import Nodes, Wire
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.engine.versions import versions
from replay_lib.errors import EngineError, UsageError
from replay_lib.snapshot import open_snapshot

BASELINE = Experiment.baseline()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two machines that meet at a free port of this one; whatever met there has parted after."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield Nodes(number=2, host="127.0.0.1", port=port, timeout_s=60)
    part()


def started(nodes: Nodes, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "replay_lib.cli", "join", "--rdzv-endpoint", nodes.endpoint]
    return subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, err or out


def is_recorded(session: ReplaySession, snapshot) -> bool:
    norm, recorded = session.run(BASELINE).grad_norm_preclip, open_snapshot(snapshot)
    return norm == pytest.approx(recorded.grad_norm_preclip, rel=1e-6)


def test_two_nodes_replay_the_recorded_step_until_one_is_killed(nodes, plain_path):
    joined = started(nodes)
    with ReplaySession.open(plain_path, device="cpu", layout="ep=2", nodes=nodes) as session:
        assert is_recorded(session, plain_path)
        assert session.info.layout["dp"] == 2
        name = socket.gethostname()
        assert session.info.notes[-1] == f"replayed on 2 nodes: this one and node 1 ({name!r})"
        there = psutil.Process(joined.pid).children(recursive=True)
        assert [p.environ()["RANK"] for p in there if "RANK" in p.environ()] == ["1"]
        joined.kill()
        start = time.monotonic()
        with pytest.raises(EngineError) as caught:
            session.run(Experiment.parse("balance-negative-advantages"))
        assert time.monotonic() - start <= 60
    gone = (
        f"node 1 ({name!r}) is gone: its spike-replay join was ended, or the connection to it "
        "broke; the other nodes ended with it"
    )
    assert str(caught.value) == gone
    assert psutil.wait_procs(there, timeout=10)[1] == []  # its ranks went with it
    with pytest.raises(EngineError) as caught:  # nobody is waited for again
        ReplaySession.open(plain_path, device="cpu", layout="ep=2", nodes=nodes)
    assert str(caught.value) == gone
    ended(joined)


@pytest.mark.slow
def test_a_rank_that_dies_elsewhere_is_named_on_every_node_and_another_session_starts(
    nodes, plain_path
):
    joined = started(nodes, "--node-rank", "1")
    with ReplaySession.open(plain_path, device="cpu", layout="dp=2", nodes=nodes) as session:
        (rank,) = [
            child
            for child in psutil.Process(joined.pid).children(recursive=True)
            if child.environ().get("RANK") == "1"
        ]
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as caught:
            session.run(BASELINE)
    assert str(caught.value).startswith("the worker's rank 1 was ended by SIGKILL")
    with ReplaySession.open(plain_path, device="cpu", layout="dp=2", nodes=nodes) as session:
        assert session.info.fidelity == "full"
        assert is_recorded(session, plain_path)
        with pytest.raises(EngineError) as caught:
            session.run(Experiment.parse("rank_examples:leaves"))
    assert "the worker's rank 1 ended itself with exit code 7" in str(caught.value)
    part()
    code, told = ended(joined)
    assert code == EngineError.exit_code
    assert "the replay ended with an error on node 0: the worker's rank 1 ended itself" in told


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces joined by a cable: their names, and the first one's address."""
    one, other = f"sr{os.getpid()}a", f"sr{os.getpid()}b"
    try:
        run("ip", "netns", "add", one)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        run("ip", "netns", "add", other)
        run("ip", "link", "add", "sr0", "netns", one, "type", "veth", "peer", "sr0", "netns", other)
        for name, address in ((one, "10.77.0.1/24"), (other, "10.77.0.2/24")):
            run("ip", "-n", name, "address", "add", address, "dev", "sr0")
            for device in ("lo", "sr0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield one, other, "10.77.0.1"
    finally:
        for name in (one, other):
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


@pytest.mark.slow
def test_two_hosts_with_nothing_but_a_cable_between_them(two_hosts, plain_path, tmp_path):
    one, other, address = two_hosts
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "sr0"}
    endpoint = ["--rdzv-endpoint", f"{address}:29400"]
    spike_replay = [sys.executable, "-m", "replay_lib.cli"]
    joined = subprocess.Popen(
        ["ip", "netns", "exec", other, *spike_replay, "join", *endpoint], env=environment
    )
    options = ["--device", "cpu", "--layout", "ep=2", "--nnodes", "2", *endpoint, "--json"]
    replay = [*spike_replay, "replay", str(plain_path), *options]
    done = subprocess.run(
        ["ip", "netns", "exec", one, *replay],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"verdict": "reproduced"' in done.stdout
    assert joined.wait(timeout=30) == 0


# what follows starts no ranks


class Guest(threading.Thread):
    """A machine that joins from a thread, without ranks; ``error`` is what it ended with."""

    def __init__(self, nodes: Nodes, node_rank: int | None = None) -> None:
        super().__init__(daemon=True)
        self.ask = (nodes.endpoint, node_rank)
        self.error: Exception | None = None
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            join(*self.ask, timeout_s=10, tell=self.lines.append)
        except (EngineError, UsageError) as error:
            self.error = error

    def at_last(self) -> str:
        self.join(timeout=20)
        assert not self.is_alive()
        return str(self.error)


@pytest.fixture
def no_ranks(monkeypatch):
    """Sessions begin and end, and no process is started for them."""

    running = SimpleNamespace(poll=lambda: None)
    job = SimpleNamespace(
        home=Path("nowhere"), process=running, wait_for_ranks=lambda _patience_s: None
    )
    monkeypatch.setattr("replay_lib.engine.joining.start_job", lambda *_a, **_k: job)


def gathered(nodes: Nodes, *ranks: int | None) -> tuple[Meeting, list[Guest]]:
    guests = [Guest(nodes, rank) for rank in ranks]
    meeting = meeting_of(nodes)
    meeting.gather()
    return meeting, guests


def test_a_node_that_never_comes_is_named_in_time(nodes):
    nodes = replace(nodes, number=3, timeout_s=1.5)
    name = socket.gethostname()
    guest = Guest(nodes, 2)
    start = time.monotonic()
    with pytest.raises(EngineError) as caught:
        meeting_of(nodes).gather()
    assert time.monotonic() - start < 5
    assert str(caught.value) == (
        f"2 of 3 nodes came to {nodes.endpoint} within 1.5 s; missing: node 1; came: this machine, "
        f"{name!r}. Start on each that is missing: spike-replay join --rdzv-endpoint "
        f"{nodes.endpoint}"
    )
    part()
    assert guest.at_last() == "None"


def test_a_replay_that_never_starts_is_told_on_the_other_nodes(nodes):
    with pytest.raises(EngineError) as caught:
        join(nodes.endpoint, timeout_s=0.3)
    assert str(caught.value).startswith(f"nobody at {nodes.endpoint} within 0.3 s (")
    assert f"node 0 runs the replay itself, with --nnodes and --rdzv-endpoint {nodes.endpoint}" in (
        str(caught.value)
    )


@pytest.mark.usefixtures("no_ranks")
def test_when_one_node_is_lost_the_others_end_with_that_error(nodes):
    nodes = replace(nodes, number=4)
    meeting, guests = gathered(nodes, None, 1, None)
    assert [guest.node_rank for guest in meeting.guests] == [1, 2, 3]
    place, each = meeting.start("cpu", 8)
    assert (each, place.arguments[1]) == (2, "--node-rank=0")
    assert not meeting.trouble()
    meeting.guests[1].wire.connection.shutdown(socket.SHUT_RDWR)  # as if the machine were gone
    assert meeting.trouble()
    part()
    told = sorted(guest.at_last() for guest in guests)
    assert told[0].startswith(f"the node that replays, {nodes.endpoint}, is gone without a word")
    assert {*told[1:]} == {f"the replay ended with an error on node 0: {meeting.lost}"}
    assert meeting.lost.startswith(f"node 2 ({socket.gethostname()!r}) is gone")


@pytest.mark.usefixtures("no_ranks")
def test_a_session_is_begun_and_ended_on_all_nodes_and_then_they_go(nodes):
    meeting, (guest,) = gathered(nodes, None)
    for _ in range(2):
        meeting.start("cpu", 2)
        meeting.stop()
    part()
    assert guest.at_last() == "None"
    session = ["session {}: 1 rank(s) on cpu", "the session is over"]
    assert guest.lines[1:] == ["node 1 of 2", *(s.format(n) for n in (1, 2) for s in session)]


def test_too_few_gpus_on_one_node_are_told(nodes, monkeypatch):
    monkeypatch.setattr("replay_lib.engine.joining.cuda_devices", lambda: 2)
    meeting, _ = gathered(nodes, None)
    with pytest.raises(UsageError) as caught:
        meeting.start("cuda", 8)
    assert str(caught.value) == (
        f"node 1 ({socket.gethostname()!r}): it has 2 NVIDIA device(s), and 8 ranks on 2 nodes "
        "need 4 on each, one a rank"
    )


def test_who_does_not_fit_is_told_why(nodes, monkeypatch):
    nodes = replace(nodes, number=3)
    meeting = meeting_of(nodes)
    waiting = threading.Thread(target=meeting.gather, daemon=True)
    waiting.start()
    here = f"{nodes.endpoint} does not take this machine: "
    expected = "--node-rank 3: expected 1 to 2; node 0 is where the replay runs"
    assert Guest(nodes, 3).at_last() == here + expected
    first = Guest(nodes, 2)
    while not meeting.guests:
        time.sleep(0.01)
    expected = "--node-rank 2: another machine has come under that number"
    assert Guest(nodes, 2).at_last() == here + expected
    other = versions() | {"torch": "1.0"}
    with monkeypatch.context() as patched:
        patched.setattr("replay_lib.engine.joining.versions", lambda: other)
        told = Guest(nodes).at_last()
    assert told == f"{here}other versions: torch 1.0 there, {versions()['torch']} on node 0"
    second = Guest(nodes)
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    part()
    assert (first.at_last(), second.at_last()) == ("None", "None")
    assert second.lines[1:] == ["node 1 of 3"]


def test_strangers_are_sent_away_and_do_not_stop_the_others(nodes, monkeypatch):
    monkeypatch.setattr(meeting_module, "HELLO_S", 0.3)
    meeting = meeting_of(nodes)
    waiting = threading.Thread(target=meeting.gather, daemon=True)
    waiting.start()
    silent, odd, rude = (
        socket.create_connection((nodes.host, nodes.port), timeout=10) for _ in range(3)
    )
    odd.sendall(b"GET / HTTP/1.1\r\n\r\n")
    rude.sendall(b'{"op": "hello", "name": "x", "gpus": "many"}\n')
    assert rude.recv(1 << 10) == b'{"op": "refused", "why": "no hello of this program"}\n'
    assert odd.recv(1) == silent.recv(1) == b""
    guest = Guest(nodes)
    waiting.join(timeout=10)
    assert [known.hello.name for known in meeting.guests] == [socket.gethostname()]
    part()
    assert guest.at_last() == "None"
    for stranger in (silent, odd, rude):
        stranger.close()


def test_a_document_without_an_end_is_not_read_for_ever():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire.__new__(Wire)
        wire.connection, wire.open, wire._pending = ours, True, b"x" * (1 << 22)
        theirs.sendall(b"x")
        assert wire.take(1.0) is None
        assert not wire.open


def test_a_name_that_leads_nowhere_else_is_refused(nodes, monkeypatch):
    inside = [(socket.AF_INET, None, 0, "", ("127.0.1.1", nodes.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_a, **_k: inside)
    with pytest.raises(UsageError) as caught:
        meeting_of(replace(nodes, host="gpu-a"))
    assert str(caught.value) == (
        "--rdzv-endpoint: found 'gpu-a', which is 127.0.1.1 here, where no other machine comes, "
        "expected an address of this machine that the others reach (ip address shows them)"
    )


def test_a_port_that_is_taken_is_told(nodes):
    meeting_of(nodes)
    with pytest.raises(UsageError, match="which cannot be listened at"):
        meeting_of(replace(nodes, number=3))


@pytest.mark.usefixtures("no_ranks")
def test_the_first_word_counts_wherever_it_was_left(nodes, monkeypatch, tmp_path):
    """Clocks of machines differ: a word travels with its age."""
    monkeypatch.setattr(meeting_module, "TELL_S", 1.0)
    meeting, _ = gathered(nodes, None)
    meeting.start("cpu", 2)
    words = [describe_error(EngineError(text)) for text in ("it is gone", "lost a peer")]
    (tmp_path / "error_rank0.json").write_text(json.dumps(words[1]))
    (guest,) = meeting.guests
    ended = {"session": 1, "code": None, "words": {1: (60.0, json.dumps(words[0]))}, "log": ""}
    guest.wire.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        guest.wire = Wire(server.accept()[0])
    with theirs:
        theirs.sendall(json.dumps({"op": "ended", **ended}).encode() + b"\n")
        assert meeting.trouble()
        meeting.collect(tmp_path)
    assert str(why_it_ended(tmp_path)) == "it is gone"
    lost = describe_error(EngineError("RuntimeError: [/gloo/transport/tcp/pair.cc:553] closed"))
    (tmp_path / "error_rank2.json").write_text(json.dumps(lost))
    os.utime(tmp_path / "error_rank2.json", (1.0, 1.0))  # of a lost peer nobody tells first
    assert str(why_it_ended(tmp_path)) == "it is gone"
    assert str(why_it_ended(tmp_path, "a node is lost")) == "a node is lost"
