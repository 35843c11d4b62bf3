"""Why a worker job ended: one error, from what its ranks and torchrun left behind. No torch.

A rank that fails, or calls ``os._exit``, leaves its error in a file; the others then fail too,
since a peer is gone, and torchrun ends them. A rank that was killed, or ended below Python, leaves
nothing: torchrun's report names it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_lib.errors import EngineError, SpikeReplayError

_FAILED = re.compile(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*(-?\d+)")
_CAUSE = "Root Cause"
_LOST_PEER = re.compile(
    r"gloo/transport|NCCL (error|communicator)|DistBackendError|ncclRemoteError"
)


def why_it_ended(home: Path, lost: str | None = None) -> SpikeReplayError | None:
    """The error that ended the job whose files are in ``home``; None where nothing tells.

    An error of ours counts first, then ``lost``, what is said of a machine that is gone, then a
    rank that ended without a word, then what the first rank met that could tell (that its peer is
    gone, for instance).
    """
    told = _told(home)
    ours = [error for error in told if error["code"] != EngineError.code]
    if ours:
        return named_error(ours[0])
    if lost is not None:
        return EngineError(lost)
    for log in _logs(home):
        if silent := _silent(home, log):
            return EngineError(f"{silent}{_end_of(log, without='[rank')}")
    return named_error(told[0]) if told else None


def _told(home: Path) -> list[dict[str, Any]]:
    """Errors that ranks wrote, the first first; one that a dying rank cut short does not count.

    Those that tell of a lost peer come last: between machines the order in time is not exact.
    """
    found: list[dict[str, Any]] = []
    for file in sorted(home.glob("error_rank*.json"), key=lambda f: f.stat().st_mtime_ns):
        try:
            found.append(json.loads(file.read_text()))
        except ValueError:
            continue
    return sorted(found, key=lambda error: bool(_LOST_PEER.search(error["message"])))


def _logs(home: Path) -> list[Path]:
    """This machine's log, then those that other machines sent."""
    return [home / "log", *sorted(home.glob("log_node*"))]


def _silent(home: Path, log: Path) -> str | None:
    """A rank that torchrun saw end and that left no word; what it calls the cause goes first."""
    text = log.read_text(errors="replace") if log.exists() else ""
    if _CAUSE not in text:
        return None
    cause = text.rfind(_CAUSE)
    for found in (*_FAILED.finditer(text, cause), *_FAILED.finditer(text, 0, cause)):
        rank, code = int(found[1]), int(found[2])
        # with SIGTERM torchrun itself ends the others
        if code != -signal.SIGTERM and not (home / f"error_rank{rank}.json").exists():
            return f"the worker's rank {rank} {_ended(code)}; the other ranks ended with it."
    return None


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and without a word"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = " (by the system too, where memory runs out)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{why}"


def named_error(reply: dict[str, Any]) -> SpikeReplayError:
    """The error that ``code`` and ``message`` of ``reply`` name."""
    kinds = (k for k in _subclasses(SpikeReplayError) if k.code == reply["code"])
    return next(kinds, EngineError)(reply["message"])


def _subclasses(kind: type[SpikeReplayError]) -> Iterator[type[SpikeReplayError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def log_end(home: Path) -> str:
    """The last lines that the worker itself wrote, as a paragraph; empty where there are none.

    Of several machines those of the others follow this one's.
    """
    return "".join(_end_of(log) for log in _logs(home))


def _end_of(log: Path, lines: int = 30, without: str | None = None) -> str:
    """Of one log. Lines that begin with ``without`` are left out: what is said of a lost peer."""
    if not log.exists():
        return ""
    told = log.read_text(errors="replace").splitlines()
    # torchrun closes with a long report of its own; what the worker said stands before it
    own = next((i for i, line in enumerate(told) if "failed (exitcode" in line), len(told))
    said = [line for line in told[:own] if without is None or not line.startswith(without)]
    last = said[-lines:]
    node = log.name.removeprefix("log").replace("_node", " on node ")
    return f"\nEnd of its log{node}:\n  " + "\n  ".join(last) if last else ""
