"""Notes that somebody types into a rendered file: they survive, byte for byte.

A file is a head, the notes between two lines that are markers, a tail, and a seal: the sha256 of
all but the notes. Where markers are damaged, or something else than the notes was edited, nothing
is lost: whoever renders the file anew keeps the old one beside it.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

START, END = b"<!-- notes -->", b"<!-- end of notes -->"
_SEAL = re.compile(
    rb"^<!-- rendered: what is outside the notes is written anew; ([0-9a-f]{64}) -->$"
)


class Noted(NamedTuple):
    """``notes`` are the bytes between the markers' lines, None where there is not one such pair.

    ``touched``: something else than the notes is not as it was rendered.
    """

    notes: bytes | None
    touched: bool


def split(content: bytes) -> Noted:
    """What is in a rendered file now; ends of lines as some editors write them are no edit."""
    lines = _lines(content)
    marks = [line.strip() for line in lines]
    if marks.count(START) != 1 or marks.count(END) != 1 or marks.index(START) > marks.index(END):
        return Noted(None, True)
    first, last = marks.index(START), marks.index(END)
    seals = [found.group(1) for mark in marks[last:] if (found := _SEAL.match(mark))]
    outside = [line.rstrip() for line in lines[: first + 1] + lines[last:]]
    rest = [line for line in outside if not _SEAL.match(line)]
    touched = len(seals) != 1 or seals[0] != _digest(rest)
    return Noted(b"".join(lines[first + 1 : last]), touched)


def join(head: str, notes: bytes, tail: str) -> bytes:
    """The whole file; ``notes`` end with a newline, or are empty."""
    before, after = head.encode("utf-8") + START + b"\n", END + b"\n" + tail.encode("utf-8")
    digest = _digest([line.rstrip() for line in _lines(before) + _lines(after)])
    seal = b"<!-- rendered: what is outside the notes is written anew; " + digest + b" -->\n"
    return before + notes + after + seal


def _lines(content: bytes) -> list[bytes]:
    """The lines of ``content`` with their ends; a line ends with a newline and nothing else."""
    return [line for line in re.split(rb"(?<=\n)", content) if line]


def _digest(lines: list[bytes]) -> bytes:
    written = b"\n".join(lines).strip()
    return hashlib.sha256(written).hexdigest().encode("ascii")
