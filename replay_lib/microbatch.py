"""How a data-parallel rank's batch was split into micro-batches.

The split matters wherever a mean and its denominator count different things, so a replay needs
the trainer's own. Dynamic: as many micro-batches as tokens ask for, filled to equal sums by
Karmarkar and Karp's differencing method, the heaviest first. Static: consecutive slices.

Source: AXRL ``seqlen_balancing.split_into_balanced_microbatches`` and
``MegatronWorker.forward_backward_batch``. Plain Python; it needs lengths, not tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from replay_lib.errors import BatchError, fault


def balanced_split(
    lengths: Sequence[int],
    width: int,
    max_token_len: int,
    at_least: int | None = None,
    multiple_of: int | None = None,
) -> list[list[int]]:
    """Row indices of each micro-batch of one rank, in the order of execution.

    ``lengths`` are the real tokens of each row, ``width`` the padded width and ``max_token_len``
    the most tokens of a micro-batch. ``at_least`` stands for the largest count of all ranks,
    ``multiple_of`` for a virtual pipeline's rounding. Raises BatchError where a row may not fit
    into a micro-batch or there are fewer rows than micro-batches.
    """
    count = max(_wanted(lengths, width, max_token_len), at_least or 0)
    return _partition(lengths, _round_up(count, multiple_of))


def static_split(rows: int, size: int) -> list[list[int]]:
    """Consecutive slices of ``size`` rows; the last may be shorter."""
    if size < 1:
        raise BatchError(fault("micro-batches", "train_micro_batch_size", str(size), "1 or more"))
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]


def split_ranks(
    lengths_per_rank: Sequence[Sequence[int]],
    widths: Sequence[int],
    *,
    dynamic: bool,
    micro_batch_size: int,
    seq_length: int,
    vpp: int | None = None,
    group: int | None = None,
) -> list[list[list[int]]]:
    """Micro-batches of every data-parallel rank: row indices by rank and micro-batch.

    Dynamic: all ranks run as many as the rank that needs most, rounded up to a multiple of ``vpp``
    and then of ``group`` (Megatron's ``microbatch_group_size_per_vp_stage``; the pipeline size
    unless it is set). Static: slices of ``micro_batch_size`` rows.
    """
    if not dynamic:
        return [static_split(len(lengths), micro_batch_size) for lengths in lengths_per_rank]
    limit = micro_batch_size * seq_length
    ranks = list(zip(lengths_per_rank, widths, strict=True))
    most = max(_wanted(lengths, width, limit) for lengths, width in ranks)
    count = _round_up(_round_up(most, vpp), group)
    return [_partition(lengths, count) for lengths in lengths_per_rank]


def _wanted(lengths: Sequence[int], width: int, max_token_len: int) -> int:
    if not lengths:
        raise BatchError(fault("micro-batches", None, "a batch without rows", "rows"))
    if max_token_len < width:
        found, expected = f"{max_token_len} tokens", f"the padded width, {width}, or more"
        then = "It is train_micro_batch_size * seq_length of the worker."
        raise BatchError(fault("micro-batches", "token limit", found, expected, then))
    return min(len(lengths), -(-sum(lengths) // max_token_len))


def _round_up(count: int, multiple_of: int | None) -> int:
    return count if multiple_of is None else -(-count // multiple_of) * multiple_of


def _partition(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Balanced groups, rows sorted inside, largest sum of squares (the cost of attention) first."""
    if not 1 <= count <= len(lengths):
        found, expected = f"{count} micro-batches", f"1 to {len(lengths)}, the rows of the rank"
        raise BatchError(fault("micro-batches", "count", found, expected))
    groups = [sorted(group) for group in _karmarkar_karp(lengths, count)]
    return sorted(groups, key=lambda g: (sum(lengths[i] ** 2 for i in g), min(g)), reverse=True)


class _Bin(NamedTuple):
    """Rows that stay together; bins compare by total, then number, then the rows themselves."""

    total: int
    number: int
    items: tuple[tuple[int, int], ...]  # (row, length) in the order in which they came

    def plus(self, other: _Bin) -> _Bin:
        return _Bin(self.total + other.total, self.number + other.number, self.items + other.items)


@dataclass(frozen=True)
class _State:
    """``count`` bins, largest first. The state with the widest spread is merged first."""

    bins: tuple[_Bin, ...]

    @property
    def spread(self) -> int:
        return self.bins[0].total - self.bins[-1].total

    def __lt__(self, other: _State) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.bins[0] > other.bins[0]

    def merged(self, other: _State) -> _State:
        # largest with smallest, so that differences cancel
        pairs = zip(self.bins, reversed(other.bins), strict=True)
        return _State(tuple(sorted((mine.plus(theirs) for mine, theirs in pairs), reverse=True)))


def _karmarkar_karp(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Partition row indices into ``count`` bins of nearly equal sums.

    Karmarkar and Karp, The differencing method of set partitioning, 1982. Ties are broken as the
    trainer breaks them: by the order of :class:`_Bin`.
    """
    empty = (_Bin(0, 0, ()),) * (count - 1)
    heap = [_State((_Bin(n, 1, ((row, n),)), *empty)) for row, n in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        widest, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, widest.merged(second))
    return [[row for row, _ in group.items] for group in heap[0].bins]
