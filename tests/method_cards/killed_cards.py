"""Record a method again and again, killed each time at another line of what writes; a script.

Children are forked from this process, which has loaded everything, and kill themselves with SIGKILL
at a random line of what writes. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from replay_lib.method_cards import writing
from replay_lib.methods import load_methods
from replay_lib.record import ledger
from replay_lib.record.cards import INDEX, read_cards, render_index
from replay_lib.record.task import Task
from tests.method_cards.make_cards import METHOD, Beside, result

#: What writes, by file and function: every line of it is a point to die at.
TRACED = {
    "method_cards/writing.py": ("_write", "record_method"),
    "replay_lib/writing.py": ("replace_file",),
    "record/ledger.py": ("append", "_open", "_cut_unfinished"),
}
METHODS = load_methods()


def record(task: Task, cards: Path, rationale: str) -> None:
    """One whole recording, without a model."""
    writing.open_engine = lambda _snapshot, _options: Beside({}, result().grad_norm_preclip)
    writing.load_methods = lambda _directories: METHODS
    wish = writing.Wish(method=METHOD, rationale=rationale)
    writing.record_method(task, wish, writing.ReplayOptions(), cards, lambda: None)


def lines_until(limit: int, task: Task, cards: Path, rationale: str) -> int:
    """Record; at the ``limit``-th traced line (from 1) the process ends. How many there were."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        code = frame.f_code
        if not any(code.co_filename.endswith(f) and code.co_name in n for f, n in TRACED.items()):
            return None
        if event == "line":
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        record(task, cards, rationale)
    finally:
        sys.settrace(None)
    return count


def child(limit: int, task: Task, cards: Path, rationale: str) -> bool:
    """Whether a forked process that does this was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            lines_until(limit, task, cards, rationale)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def main(root: Path, cards: Path, job: str, rounds: int) -> dict[str, Any]:
    """Every other time the card is a new one, so that the index changes with it."""
    task = Task(job, root)
    card, index, points = cards / f"{METHOD}.md", cards / INDEX, random.Random(7)
    by_hand = card.read_bytes()
    killed, odd, seen = 0, [], {"old": 0, "card alone": 0, "new": 0}
    for number in range(rounds):
        states = []
        for _ in ("how it ends when nothing happens", "where it is killed"):
            card.unlink() if number % 2 else card.write_bytes(by_hand)
            index.write_text(render_index(METHODS, read_cards(cards)))
            if not states:
                states = [contents(card, index)]
                lines = lines_until(-1, task, cards, f"why {number}")
                states += [(contents(card, index)[0], states[0][1]), contents(card, index)]
        killed += child(points.randint(1, lines), task, cards, f"why {number}")
        now = contents(card, index)
        if now in states and all(event.kind for event in ledger.read(task)):
            seen[list(seen)[states.index(now)]] += 1
        else:
            odd.append(number)
        record(task, cards, f"why {number}")
        if contents(card, index) != states[2]:
            odd.append(number)
    return {"killed": killed, "odd": odd, "seen": seen, "lines": lines}


def contents(*files: Path) -> tuple[bytes | None, ...]:
    return tuple(file.read_bytes() if file.exists() else None for file in files)


if __name__ == "__main__":
    root, cards, job, rounds = sys.argv[1:]
    print(json.dumps(main(Path(root), Path(cards), job, int(rounds))))
