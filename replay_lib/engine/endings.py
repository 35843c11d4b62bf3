"""Why a worker job ended: one error, from what its ranks and torchrun left behind. No torch.

A rank that fails leaves its error in a file; the others then fail too, since a peer is gone, and
torchrun ends them. A rank that was killed leaves nothing: torchrun's report names it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_lib.errors import EngineError, SpikeReplayError

_KILLED = re.compile(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-(\d+)")
_CAUSE = "Root Cause"


def why_it_ended(home: Path) -> SpikeReplayError | None:
    """The error that ended the job whose files are in ``home``; None where nothing tells.

    An error of ours counts first, then a rank that a signal ended, then what the first rank met
    that could tell (that its peer is gone, for instance).
    """
    told = _told(home)
    ours = [error for error in told if error["code"] != EngineError.code]
    if ours:
        return named_error(ours[0])
    killed = _killed(home / "log")
    if killed:
        return EngineError(f"{killed}{log_end(home, without='[rank')}")
    return named_error(told[0]) if told else None


def _told(home: Path) -> list[dict[str, Any]]:
    """Errors that ranks wrote, the first first; one that a dying rank cut short does not count."""
    found: list[dict[str, Any]] = []
    for file in sorted(home.glob("error_rank*.json"), key=lambda f: f.stat().st_mtime_ns):
        try:
            found.append(json.loads(file.read_text()))
        except ValueError:
            continue
    return found


def _killed(log: Path) -> str | None:
    """The rank that torchrun calls the cause, where a signal ended it (not torchrun's own)."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = _KILLED.search(text, max(text.rfind(_CAUSE), 0)) if _CAUSE in text else None
    if found is None or int(found[2]) == signal.SIGTERM:
        return None
    number = int(found[2])
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    why = " (by the system too, where memory runs out)" if number == signal.SIGKILL else ""
    return f"the worker's rank {found[1]} was ended by {name}{why}; the other ranks ended with it."


def named_error(reply: dict[str, Any]) -> SpikeReplayError:
    """The error that ``code`` and ``message`` of ``reply`` name."""
    kinds = (k for k in _subclasses(SpikeReplayError) if k.code == reply["code"])
    return next(kinds, EngineError)(reply["message"])


def _subclasses(kind: type[SpikeReplayError]) -> Iterator[type[SpikeReplayError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def log_end(home: Path, lines: int = 30, without: str | None = None) -> str:
    """The last lines that the worker itself wrote, as a paragraph; empty where there are none.

    Lines that begin with ``without`` are left out: what the other ranks say of a lost peer.
    """
    log = home / "log"
    if not log.exists():
        return ""
    told = log.read_text(errors="replace").splitlines()
    # torchrun closes with a long report of its own; what the worker said stands before it
    own = next((i for i, line in enumerate(told) if "failed (exitcode" in line), len(told))
    said = [line for line in told[:own] if without is None or not line.startswith(without)]
    last = said[-lines:]
    return "\nEnd of its log:\n  " + "\n  ".join(last) if last else ""
