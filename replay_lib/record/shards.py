"""Which shard of several a case or a test file belongs to: the same answer on every machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay_lib.case import Case
from replay_lib.errors import CaseError, UsageError
from replay_lib.record.baselines import files_in, read_document


@dataclass(frozen=True)
class Shard:
    """The ``index``-th of ``count`` shards, counted from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From ``i/n`` with 1 <= i <= n; UsageError else."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        shard = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= shard.index <= shard.count:
            raise UsageError(f"shard: found {text!r}, expected i/n with 1 <= i <= n, as in 1/4")
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def cost_of(case: Case) -> float | None:
    """Seconds that the replays of a case took, by its baselines; None without any.

    The largest over all environments: every machine of a sharded run has to get the same figure.
    A document that cannot be read tells nothing here; the tests of its case say what is wrong.
    """
    files = files_in(case.file) if case.file is not None else []
    return max(filter(None, map(_seconds_in, files)), default=None)


def _seconds_in(file: Path) -> float | None:
    try:
        document = read_document(file)
    except CaseError:
        return None
    return document.seconds if document else None


def dearest_first(cases: Iterable[Case]) -> list[Case]:
    """By recorded cost, then by name; a case of unknown cost may be dear, so it comes first."""
    costs = {case.name: cost_of(case) for case in cases}
    return sorted(cases, key=lambda c: (costs[c.name] is not None, -(costs[c.name] or 0.0), c.name))


def split_cases(cases: Sequence[Case], count: int) -> dict[str, int]:
    """The shard (1 to ``count``) of each case by name: dearest first, each to the emptiest shard.

    A case of unknown cost counts as the dearest known one.
    """
    known = [cost for case in cases if (cost := cost_of(case)) is not None]
    unknown = max(known, default=1.0)
    load = [(0.0, 0)] * count  # seconds, cases
    shards = {}
    for case in dearest_first(cases):
        emptiest = load.index(min(load))
        seconds, number = load[emptiest]
        cost = cost_of(case)
        load[emptiest] = (seconds + (unknown if cost is None else cost), number + 1)
        shards[case.name] = emptiest + 1
    return shards


def shard_of_file(path: str, count: int) -> int:
    """The shard of a test file that replays no case, by the sha256 of its path."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % count + 1
