"""Spikes that a trainer's log tells of, and a copy of the log.

The line is the trainer's own warning, one a rank::

    Gradient spike detected at step 85, grad_norm=8.4419, saving debug snapshot.

Anything may stand before it: the logger's time and file, Ray's ``(Worker pid=.., ip=..)``, colours,
a JSON key. Logs are read in blocks: neither a long log nor a long line is ever held in memory.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from replay_lib import layout
from replay_lib.errors import UsageError, fault
from replay_lib.unfinished import flush

BLOCK = 4 << 20  # bytes read at once
_BEFORE, _AFTER = 512, 256  # bytes of a line that are looked at around the warning
MOST_SPIKES = 10_000  # a log that tells of more is not a trainer's

_SPIKE = b"Gradient spike detected at step "
_NON_FINITE = b"NaN/Inf in gradients at step "
_SPIKE_LINE = re.compile(
    _SPIKE + rb"(\d{1,18}), grad_norm=([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|inf|nan))", re.ASCII
)
_NON_FINITE_LINE = re.compile(_NON_FINITE + rb"(\d{1,18}), optimizer step skipped", re.ASCII)
_TIME = re.compile(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


@dataclass(frozen=True, kw_only=True)
class Mention:
    """A spike as a log tells it: ``norm`` with four decimals, ``lines`` (one a rank, mostly).

    ``at`` is the time that the first line states, in the log's own zone; "" where it states none.
    """

    step: int
    norm: str
    at: str
    lines: int


@dataclass(kw_only=True)
class LogRead:
    """What one log told. ``cut`` says why it could not be read to its end; "" where it could."""

    path: Path
    bytes: int = 0
    mentions: list[Mention] = field(default_factory=list)
    non_finite_steps: list[int] = field(default_factory=list)
    cut: str = ""


def logs_in(output: Path) -> list[Path]:
    """Logs in an output directory and one level below it, where the trainer's scripts put them."""
    try:
        below = [p for p in output.iterdir() if p.is_dir() and _may_hold_logs(p)]
    except OSError:
        return []  # a log in there can still be named
    return sorted(path for directory in (output, *below) for path in _logs_right_in(directory))


def _may_hold_logs(directory: Path) -> bool:
    return directory.name != layout.CHECKPOINTS and not directory.name.startswith(".")


def _logs_right_in(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if _LOG.search(e.name) and e.is_file()]
    except OSError:
        return []
    return [directory / name for name in names]


_LOG = re.compile(r"\.(log|out|err)(\.\d+)?(\.(gz|bz2|xz|zst))?$")


def copy_log(log: Path, directory: Path) -> Path:
    """Copy ``log`` as it is (compressed stays compressed) into ``directory``; the copy's path.

    It has its name only once it is whole. UsageError where it cannot be read, or there is no room.
    """
    check_log(log)
    number = 0
    while (target := directory / (f"{number}-{log.name}" if number else log.name)).exists():
        number += 1
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(log, part)
        flush(part)
        part.rename(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        found = f"no copy into {directory} ({error.strerror or error})"
        raise UsageError(fault(log, None, found, "a log that can be copied there")) from error
    return target


def check_log(log: Path) -> None:
    """UsageError where ``log`` is no regular file that can be read."""
    try:
        kind = log.stat().st_mode
        if stat.S_ISREG(kind):
            with log.open("rb"):
                return
        found = "a directory" if stat.S_ISDIR(kind) else "no regular file"
    except OSError as error:
        found = repr(error.strerror or str(error))
    raise UsageError(fault(log, None, found, "a log: plain, .gz, .bz2, .xz or .zst"))


def read_log(log: Path, told_as: Path | None = None) -> LogRead:
    """Read ``log`` to its end and tell its spikes, in the order in which they first appear.

    ``told_as`` is the path that is told instead (a copy is read). A compressed log that ends in the
    middle, as one does that is still written, is told as far as it goes.
    """
    check_log(log)
    read = LogRead(path=told_as or log)
    spikes: dict[tuple[int, str], Mention] = {}
    odd: dict[int, None] = {}
    try:
        with _opened(log) as stream:
            for window in _windows(stream, read):
                _look_at(window, spikes, odd)
    except _broken() as error:
        read.cut = f"it ends or breaks after {read.bytes} bytes ({error})"
    read.mentions, read.non_finite_steps = list(spikes.values()), list(odd)
    return read


@dataclass(frozen=True)
class _Window:
    """A block of a log; warnings that begin in ``[start, end)`` are to be looked at."""

    block: bytes
    start: int
    end: int


def _windows(stream: IO[bytes], read: LogRead) -> Iterator[_Window]:
    carried, start = b"", 0
    while chunk := stream.read(BLOCK):
        read.bytes += len(chunk)
        block = carried + chunk
        end = max(len(block) - _AFTER, start)
        yield _Window(block, start, end)
        cut = max(end - _BEFORE, 0)
        carried, start = block[cut:], end - cut
    yield _Window(carried, start, len(carried))


def _look_at(window: _Window, spikes: dict[tuple[int, str], Mention], odd: dict[int, None]) -> None:
    for at in _places(window, _SPIKE):
        match = _SPIKE_LINE.match(window.block, at)
        if match is None:
            continue
        step, norm = int(match.group(1)), match.group(2).decode("ascii")
        known = spikes.get((step, norm))
        if known is None and len(spikes) < MOST_SPIKES:
            told = _time_before(window.block, at)
            spikes[step, norm] = Mention(step=step, norm=norm, at=told, lines=1)
        elif known is not None:
            spikes[step, norm] = Mention(**{**vars(known), "lines": known.lines + 1})
    for at in _places(window, _NON_FINITE):
        match = _NON_FINITE_LINE.match(window.block, at)
        if match is not None and len(odd) < MOST_SPIKES:
            odd[int(match.group(1))] = None


def _places(window: _Window, text: bytes) -> Iterator[int]:
    at = window.block.find(text, window.start)
    while 0 <= at < window.end:
        yield at
        at = window.block.find(text, at + len(text))


def _time_before(block: bytes, at: int) -> str:
    """The last time that is stated on the same line before ``at``."""
    line = block[max(at - _BEFORE, 0) : at]
    line = line[max(line.rfind(b"\n"), line.rfind(b"\r")) + 1 :]
    times = _TIME.findall(line)
    return times[-1].decode("ascii") if times else ""


@contextmanager
def _opened(log: Path) -> Iterator[IO[bytes]]:
    """The log's text, decompressed as its first bytes say, whatever its name is."""
    with log.open("rb") as raw:
        head = raw.read(8)
        raw.seek(0)
        kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "plain")
        with _DECOMPRESS[kind](raw) as stream:
            yield stream


def _zstd(raw: IO[bytes]) -> Any:
    try:
        zstandard: Any = import_module("zstandard")
    except ImportError as error:
        then = "Install zstandard, or give the log decompressed (zstd -d)"
        raise UsageError(
            fault(raw.name, None, "a log compressed with zstd", "the package zstandard", then)
        ) from error
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)


def _broken() -> tuple[type[Exception], ...]:
    """What is raised by compressed bytes that end in the middle or are none."""
    loaded: Any = sys.modules.get("zstandard")
    return (EOFError, zlib.error, lzma.LZMAError, OSError, *([loaded.ZstdError] if loaded else []))


_DECOMPRESS: dict[str, Callable[[IO[bytes]], Any]] = {
    "plain": lambda raw: raw,
    "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": _zstd,
}
