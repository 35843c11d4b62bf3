"""Copy directories to a node once: each lies under a name made of its content.

A copy grows in ``<place>.part`` and is renamed when it is whole, so a place that is there is
whole. A copy that was broken off is taken up where it stopped. Two copies of one thing wait for
each other.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from replay_lib.errors import NodeError, UsageError
from replay_lib.remote.probe import Facts
from replay_lib.remote.shell import SSH_FAILED, Node, last_words, quoted

_RSH = Path(__file__).with_name("node_rsh.py")
_THERE = 77  # the place was made meanwhile, by another copy of the same
_LOCK_SECONDS = 6 * 3600  # another copy of the same may take hours
_MARGIN = 64 << 20  # bytes left free for logs and results
_DONE = re.compile(rb"(\d+)%")
_STALLED = 300  # seconds without a byte, to rsync a broken connection


@dataclass(frozen=True)
class Parcel:
    """Files of this machine and where they go: ``place`` is below the node's directory.

    ``parts`` are (directory here, directory inside ``place``, files relative to it).
    """

    place: str
    parts: tuple[tuple[Path, str, tuple[str, ...]], ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum((home / name).stat().st_size for home, _, names in self.parts for name in names)


Told = Callable[[str], None]


def send(node: Node, facts: Facts, parcels: Sequence[Parcel], tell: Told) -> int:
    """Copy what the node does not have yet; the number of parcels that were copied.

    UsageError where rsync is not installed here, NodeError for a full disk there, or a copy that
    broke off: called again, it goes on.
    """
    wanted = _absent(node, facts, parcels)
    if wanted and shutil.which("rsync") is None:
        raise UsageError(
            "--ssh: found no rsync on this machine, which copies to the node; install it"
        )
    needed = sum(parcel.size for parcel in wanted)
    if wanted and not needed + _MARGIN <= facts.free + _partly(node, facts, wanted):
        raise _full(node, facts, f"{_told(facts.free)} free, {_told(needed + _MARGIN)} needed")
    for parcel in wanted:
        _send(node, facts, parcel, tell)
    return len(wanted)


def _absent(node: Node, facts: Facts, parcels: Sequence[Parcel]) -> list[Parcel]:
    """Those whose place is not there; what is there is marked as used today."""
    lines = [
        f"cd {quoted(facts.directory)} || exit 1",
        *(f"touch -c {quoted(p.place)}; test -d {quoted(p.place)}; echo $?" for p in parcels),
    ]
    there = node.run("\n".join(lines)).split()[-len(parcels) :]
    return [p for p, status in zip(parcels, there, strict=True) if status != "0"]


def _partly(node: Node, facts: Facts, parcels: Sequence[Parcel]) -> int:
    """Bytes of ``parcels`` that are there already, from copies that were broken off."""
    names = " ".join(quoted(f"{p.place}.part") for p in parcels)
    told = node.run(f"cd {quoted(facts.directory)} && du -ks -- {names} 2>/dev/null; echo end")
    return sum(int(line.split()[0]) << 10 for line in told.splitlines() if line[:1].isdigit())


def _send(node: Node, facts: Facts, parcel: Parcel, tell: Told) -> None:
    """Copy one parcel, all of its parts at once, and make its place."""
    final = f"{facts.directory}/{parcel.place}"
    with tempfile.TemporaryDirectory(prefix="send-") as scratch:
        names: list[str] = []
        for home, inside, files in parcel.parts:
            link = Path(scratch) / inside
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(home.absolute())
            names += [f"{inside}/{name}" for name in files]
        size = _told(parcel.size)
        code, said = _followed(
            _rsync(scratch, f"{final}.part"),
            b"".join(os.fsencode(name) + b"\0" for name in names),
            _rsh(node, final),
            lambda share: tell(f"copying {size}: {share}%"),
        )
    if code != 0:
        _explain(node, facts, parcel, code, said)
    # the lock is kept: whoever waits for it finds the place made
    part, whole = quoted(f"{final}.part"), quoted(final)
    node.run(f"test -d {whole} || mv -T {part} {whole}; test -d {whole}")


def _rsync(here: str, there: str) -> list[str]:
    return [
        "rsync",
        "--times",
        "--copy-links",
        "--inplace",  # and so --partial: what was copied stays, whoever is killed
        "--protect-args",
        "--from0",
        "--files-from=-",
        "--info=progress2",
        f"--timeout={_STALLED}",
        "-e",
        f"{_word(sys.executable)} -I {_word(str(_RSH))}",
        f"{here}/",
        f"node:{there}/",
    ]


def _rsh(node: Node, final: str) -> dict[str, str]:
    """The environment of rsync, in which its remote shell finds the node and the lock."""
    lock, whole, part = (quoted(f"{final}{end}") for end in (".lock", "", ".part"))
    before = (
        f"mkdir -p {part} || exit 1\nexec 9>>{lock} || exit 1\n"
        f"flock -w {_LOCK_SECONDS} 9 || exit 1\ntest -d {whole} && exit {_THERE}\n"
    )
    told = {"ssh": node.ssh, "before": before}
    return dict(os.environ) | {"SPIKE_REPLAY_RSH": json.dumps(told), "LC_ALL": "C"}


def _explain(node: Node, facts: Facts, parcel: Parcel, code: int, said: bytes) -> None:
    """NodeError, unless the place was made meanwhile by somebody else's copy."""
    place = quoted(f"{facts.directory}/{parcel.place}")
    looked = f"test -d {place} && echo made\nstat -f -c '%a %S' -- {quoted(facts.directory)}"
    *made, room = node.run(looked).splitlines()[-2:]
    if "made" in made:
        return
    # the words for it are lost where the connection ended first
    free = math.prod(int(number) for number in room.split())
    if b"No space left" in said or b"Disk quota exceeded" in said or free < _MARGIN >> 6:
        raise _full(node, facts, last_words(said))
    why = "the connection broke" if code in (12, 30, SSH_FAILED) else f"rsync ended with {code}"
    raise NodeError(
        f"node {node.told}: copying {parcel.parts[0][0]} broke off ({why}): {last_words(said)}. "
        "Repeat the command: it goes on from there"
    )


def _followed(
    command: Sequence[str], given: bytes, env: dict[str, str], tell: Callable[[int], None]
) -> tuple[int, bytes]:
    """Exit status and stderr of rsync; ``tell`` gets the percentage as it grows."""
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as errors:
        names.write(given)
        names.seek(0)
        with subprocess.Popen(
            command, stdin=names, stdout=subprocess.PIPE, stderr=errors, env=env
        ) as running:
            assert running.stdout is not None
            try:
                share = -1
                while chunk := running.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                    now = max(map(int, _DONE.findall(chunk)), default=share)
                    if now >= share + 5:
                        tell(share := now)
            except BaseException:
                with suppress(ProcessLookupError):
                    running.terminate()
                raise
        errors.seek(0)
        return running.returncode, errors.read()


def _word(text: str) -> str:
    """One word of rsync's own ``-e``: inside single quotes nothing but that quote is special."""
    return "'" + text.replace("'", "''") + "'"


def _full(node: Node, facts: Facts, found: str) -> NodeError:
    return NodeError(
        f"node {node.told}: no room in {facts.directory}: {found}. Name another place there with "
        f"--remote-dir, or remove what is no longer replayed from {facts.directory}/cases"
    )


def _told(size: int) -> str:
    """Bytes for a reader."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
