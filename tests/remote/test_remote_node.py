"""What is said of a node that cannot be used, before and while something is copied there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Loopback

from replay_lib.errors import NodeError, SpikeReplayError, UsageError
from replay_lib.remote import node_probe, probe, sync
from replay_lib.remote.probe import MARK, NEEDS, Facts
from replay_lib.remote.shell import Node, wrapped
from replay_lib.remote.sync import Parcel, send

ROOT = Path(__file__).parents[2]
ODD = 'it\'s "odd" `x` $(false)\n;\\ \udc80*'


@pytest.fixture
def plain(tmp_path: Path) -> Node:
    """Another command in ssh's place: a login that prints something and has few programs."""
    few = tmp_path / "few"
    few.mkdir()
    for name in ("sh", "base64", "echo", "mkdir", "flock", "head"):
        (few / name).symlink_to(_which(name))
    script = tmp_path / "no ssh"
    script.write_text(f'#!/bin/sh\necho "Welcome!"\nPATH={shlex.quote(str(few))} exec sh -c "$2"\n')
    script.chmod(0o755)
    return Node.parse(f"{shlex.quote(str(script))} host")


def _which(name: str) -> str:
    done = subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, check=True)
    found = done.stdout.decode().strip()
    return found if found.startswith("/") else f"/bin/{name}"


@pytest.mark.parametrize("text", ["", "ssh", "ssh 'host", "ssh ho\0st"])
def test_what_is_no_ssh_command_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="expected an ssh command with the node's name"):
        Node.parse(text)


def test_no_such_program_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'no-such-ssh' cannot be started"):
        Node.parse("no-such-ssh host").run("true")


def test_the_login_shell_sees_letters_alone() -> None:
    line = wrapped(f"printf %s {shlex.quote(ODD)}")
    assert re.fullmatch(r"exec sh -c 'eval \"\$\(echo [A-Za-z0-9+/=]+\|base64 -d\)\"'", line)
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert done.stdout == ODD.encode("utf-8", "surrogateescape")


def test_no_connection(node: Loopback) -> None:
    nobody = re.sub(r"-p \d+", "-p 1", node.ssh).replace("-q", "")
    with pytest.raises(NodeError, match=r"no connection: .*onnection refused"):
        probe.probe(Node.parse(nobody), None, None)


def test_no_rsync_there(plain: Node) -> None:
    with pytest.raises(NodeError, match=r"found no rsync there.*Install rsync on the node"):
        probe.probe(plain, None, "/nowhere")


def test_an_interpreter_without_the_packages(node: Loopback, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E -I "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(NodeError) as told:
        probe.probe(Node.parse(node.ssh), str(bare), str(node.directory))
    assert f"{bare}: no torch, no megatron-core" in str(told.value)
    assert "Name one with --remote-python" in str(told.value)


def test_an_interpreter_that_is_not_there(node: Loopback) -> None:
    with pytest.raises(NodeError, match="/no/python"):
        probe.probe(Node.parse(node.ssh), "/no/python", str(node.directory))


def test_what_an_interpreter_lacks() -> None:
    good = {name: lowest for name, _, lowest in NEEDS}
    told = {"version": [3, 12, 1], "versions": good}
    assert probe.lacks(told) == []
    assert probe.lacks(told | {"version": [3, 10, 4]}) == ["Python 3.10.4, too old"]
    assert probe.lacks(told | {"version": None}) == ["cannot be started"]
    newer = good | {"torch": "2.11.0+cu129", "megatron-core": "0.16.0rc1", "numpy": ""}
    assert probe.lacks(told | {"versions": newer}) == ["megatron-core 0.16.0rc1, older than 0.16.1"]
    assert probe.lacks(told | {"versions": good | {"torch": None}}) == ["no torch"]


def test_what_a_node_needs_is_what_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = dict(
        re.fullmatch(r"([a-z0-9-]+)>=([0-9.]+).*", line).groups()  # type: ignore[union-attr]
        for line in project["dependencies"]
    )
    tests_alone = {"pytest", "pytest-xdist", "pytest-timeout"}
    pages_alone = {"jinja2", "matplotlib"}
    assert {name: lowest for name, _, lowest in NEEDS} == {
        name: lowest for name, lowest in stated.items() if name not in tests_alone | pages_alone
    }
    assert project["requires-python"] == ">=" + ".".join(map(str, probe.LEAST_PYTHON))


def test_a_run_needs_nothing_else_of_what_is_installed() -> None:
    code = (
        "import sys, replay_lib.remote.node_run; "
        "sys.exit(bool({'jinja2', 'matplotlib', 'pytest', 'torch'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_this_interpreter_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, node_probe.__file__, "python3", "kept", json.dumps(NEEDS), MARK],
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    told = json.loads(done.stdout.decode().removeprefix(MARK))
    assert probe.lacks(told) == []
    assert told["directory"] == str(tmp_path / "kept")
    assert told["fault"] == ""
    assert told["free"] > 0


def test_a_directory_that_cannot_be_made(node: Loopback, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeError, match=r"cannot be made there .*Name another with --remote-dir"):
        probe.probe(Node.parse(node.ssh), str(node.python), str(tmp_path / "file" / "below"))


def test_a_directory_that_no_module_can_be_found_in(node: Loopback) -> None:
    with pytest.raises(UsageError, match="--remote-dir: found '/a:b'"):
        probe.probe(Node.parse(node.ssh), str(node.python), "/a:b")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs more rights than these tests have")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _facts(directory: Path, free: int) -> Facts:
    return Facts(python="python3", directory=str(directory), free=free, host="here", versions={})


def _parcel(home: Path, size: int) -> Parcel:
    home.mkdir()
    (home / "large").write_bytes(b"x" * size)
    return Parcel("cases/0", ((home, "snapshot/iter_0000085", ("large",)),))


def test_a_full_disk_there(node: Loopback, small_disk: Path, tmp_path: Path) -> None:
    over, parcel = Node.parse(node.ssh), _parcel(tmp_path / "here", 2 << 20)
    with pytest.raises(NodeError, match=r"1\.0 MB free, 69\.2 MB needed.*--remote-dir"):
        send(over, _facts(small_disk, 1 << 20), [parcel], lambda _: None)
    # somebody else fills it meanwhile
    with pytest.raises(NodeError, match=r"(?s)no room in .*--remote-dir"):
        send(over, _facts(small_disk, 1 << 40), [parcel], lambda _: None)
    assert not (small_disk / "cases" / "0").exists()


def test_a_copy_that_was_cut_goes_on_where_it_stopped(node: Loopback, tmp_path: Path) -> None:
    over, parcel = Node.parse(node.ssh), _parcel(tmp_path / "here", 40 << 20)
    facts = _facts(tmp_path / "there", 1 << 40)
    Path(facts.directory).mkdir()
    told: list[str] = []

    def cut(what: str) -> None:
        told.append(what)
        node.cut()

    with pytest.raises(NodeError, match="it goes on from there"):
        send(over, facts, [parcel], cut)
    assert told[0].startswith("copying 41.9 MB: ")
    (part,) = Path(facts.directory).glob("cases/0.part/snapshot/iter_0000085/large")
    assert part.exists()
    assert send(over, facts, [parcel], told.append) == 1
    assert send(over, facts, [parcel], told.append) == 0
    copy = Path(facts.directory) / "cases/0/snapshot/iter_0000085/large"
    assert copy.read_bytes() == (tmp_path / "here" / "large").read_bytes()


def test_no_rsync_here(node: Loopback, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sync.shutil, "which", lambda _name: None)
    with pytest.raises(UsageError, match="found no rsync on this machine"):
        send(Node.parse(node.ssh), _facts(tmp_path, 1 << 40), [_parcel(tmp_path / "h", 1)], print)


def test_errors_of_a_node_have_their_code() -> None:
    assert issubclass(NodeError, SpikeReplayError)
    assert (NodeError.code, NodeError.exit_code) == ("node", 6)
