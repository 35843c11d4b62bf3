"""Plain values between the ranks of a job on one machine, through files beside the channel.

AXRL's worker makes the process group by itself, so there is none before it has started, and
afterwards it is not ours to use.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PAUSE_S = 0.05


@dataclass
class Board:
    """The same notices in the same order on every rank; a dead rank is torchrun's to notice."""

    home: Path
    rank: int
    world: int
    _posted: int = field(default=0)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's plain value, on every rank."""
        self._posted += 1
        if self.rank == 0:
            self._post(0, value)
            return value
        return self._read(0)

    def gather(self, value: Any) -> list[Any]:
        """Plain values of every rank, in rank order, on rank 0; empty on the others."""
        self._posted += 1
        self._post(self.rank, value)
        return [self._read(rank) for rank in range(self.world)] if self.rank == 0 else []

    def _file(self, rank: int) -> Path:
        return self.home / f"notice{self._posted}_rank{rank}.json"

    def _post(self, rank: int, value: Any) -> None:
        file = self._file(rank)
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(value))
        unfinished.replace(file)

    def _read(self, rank: int) -> Any:
        file = self._file(rank)
        while not file.exists():
            time.sleep(_PAUSE_S)
        return json.loads(file.read_text())
