"""Sums over the ranks that replay. With one rank every call returns what it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from replay_lib.engine.groups import Groups


@dataclass(frozen=True)
class Comm:
    """This process among the replaying ranks; ``device`` carries the tensors of a reduction."""

    rank: int
    world: int
    device: torch.device
    groups: Groups = field(default_factory=Groups)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(x) for x in tensor.tolist()]

    def sums_of_batches(self, values: Sequence[float]) -> list[float]:
        """Sums of what every rank knows about its batches; ranks that share batches count once."""
        return self.sums([float(v) if self.groups.speaks else 0.0 for v in values])

    def gather(self, value: Any) -> list[Any]:
        """Plain values of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def broadcast(self, value: Any) -> Any:
        """Rank 0's plain value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]
