"""The ranks of a training job, as far as they have to agree: one gloo group of their own.

A job of one process needs no process group and no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

T = TypeVar("T")

#: Ranks wait this long for each other: the slowest one may have a large shard to write.
PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Ranks:
    """This process among ``size``; ``group`` is None where it is alone."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank; all ranks call this."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank; all ranks call this."""
        return self.gathered(value if self.rank == 0 else None)[0]


class UnwrittenError(Exception):
    """Some rank could not do its part; every rank raises this, with the first rank's reason."""


def together(ranks: Ranks, do: Callable[[], T]) -> T:
    """``do()`` on every rank; where it fails on one, all raise UnwrittenError and none waits."""
    made, wrong, cause = None, "", None
    try:
        made = do()
    except Exception as error:  # whatever it is, the other ranks have to know
        wrong, cause = f"{type(error).__name__}: {error}", error
    told = [f"rank {rank}: {text}" for rank, text in enumerate(ranks.gathered(wrong)) if text]
    if told:
        raise UnwrittenError(told[0] if ranks.size > 1 else told[0].partition(": ")[2]) from cause
    return cast("T", made)


def join_ranks() -> Ranks:
    """The ranks of ``torch.distributed``'s default group; all of them call this.

    A group of its own, over gloo: it works beside NCCL and never waits for a device.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size(), group)
