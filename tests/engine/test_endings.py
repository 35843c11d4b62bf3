"""Which of the things that ranks and torchrun left behind is told as the end of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from replay_lib.engine.endings import why_it_ended
from replay_lib.errors import EngineError, PatchError

LOST = {"code": "engine", "message": "Connection closed by peer"}
OURS = {"code": "patch", "message": "a patch at the batch seam raised"}


def report(cause: tuple[int, int], *others: tuple[int, int]) -> str:
    """torchrun's closing report: (rank, exit code) of the cause and of what else it saw."""

    def entry(number: int, rank: int, code: int) -> str:
        return (
            f"[{number}]:\n  time      : 2026-01-01\n  host      : here\n"
            f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 42)\n"
        )

    listed = "".join(entry(i + 1, *o) for i, o in enumerate(others)) or "  <NO_OTHER_FAILURES>\n"
    told = "what the worker said\nE0000 failed (exitcode: 1) local_rank: 0\n"
    return f"{told}Failures:\n{listed}Root Cause (first observed failure):\n{entry(0, *cause)}"


def leave(home: Path, log: str, words: dict[int, dict[str, str]]) -> None:
    """The files of a job, the words written in the order given."""
    (home / "log").write_text(log)
    for order, (rank, word) in enumerate(words.items()):
        file = home / f"error_rank{rank}.json"
        file.write_text(json.dumps(word))
        os.utime(file, ns=(order, order))


SILENT = "the worker's rank 1 ended with exit code 3 and without a word; the other ranks"


@pytest.mark.parametrize(
    ("log", "words", "kind", "start"),
    [
        (report((1, 3)), {0: LOST}, EngineError, SILENT),
        (report((0, 1), (1, 3)), {0: LOST}, EngineError, SILENT),  # seen in the same second
        (report((1, -9), (0, 1)), {0: LOST}, EngineError, "the worker's rank 1 was ended by SIGKI"),
        (report((1, -15), (0, 1)), {0: LOST}, EngineError, "Connection closed by peer"),
        (report((1, 1), (0, 1)), {0: LOST, 1: OURS}, PatchError, OURS["message"]),
        (report((1, 1)), {1: LOST}, EngineError, "Connection closed by peer"),
        (report((0, 5)), {}, EngineError, "the worker's rank 0 ended with exit code 5 and without"),
    ],
)
def test_the_rank_that_ended_first_is_told(tmp_path, log, words, kind, start):
    leave(tmp_path, log, words)
    error = why_it_ended(tmp_path)
    assert type(error) is kind
    assert str(error).startswith(start)
    if "rank" in start:
        assert str(error).endswith("End of its log:\n  what the worker said")


def test_where_nothing_was_left_nothing_is_told(tmp_path):
    assert why_it_ended(tmp_path) is None
