"""Rows packed for one rank of a tensor- and context-parallel group, and log-probabilities back.

Each row is lengthened to a multiple of what its split needs (twice the context-parallel size times
the tensor-parallel size; the tensor-parallel size alone where there is no context parallelism), the
last one until the total is a multiple of 128 for every rank. With context parallelism a row is cut
into ``2 * cp`` chunks, of which rank r has number r and number ``2 * cp - 1 - r``: a causal row
then costs every rank the same. Source: AXRL ``pack_utils``.

Legend: B rows, T padded width, N packed tokens of all ranks, n those of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Where the tokens of a micro-batch lie.

    ``starts`` are the B + 1 offsets of the lengthened rows among all N packed tokens, ``mine``
    int64 ``[n]`` the packed places of this rank's tokens in its own order, and ``all`` int64
    ``[cp, n]`` those of every context-parallel rank.
    """

    starts: tuple[int, ...]
    mine: Tensor
    all: Tensor


def places(lengths: list[int], tp: int, cp: int, cp_rank: int) -> Places:
    """Places for rows of ``lengths`` real tokens."""
    each = tp * cp * 2 if cp > 1 else tp
    padded = [-(-n // each) * each for n in lengths]
    padded[-1] += -sum(padded) % math.lcm(each, 128 * tp * cp)
    starts = [0]
    for n in padded:
        starts.append(starts[-1] + n)
    ranks = [[_chunks(starts[i], n, cp, rank) for i, n in enumerate(padded)] for rank in range(cp)]
    table = torch.stack([torch.cat(parts) for parts in ranks])
    return Places(starts=tuple(starts), mine=table[cp_rank], all=table)


def _chunks(start: int, length: int, cp: int, rank: int) -> Tensor:
    if cp == 1:
        return torch.arange(start, start + length)
    half = length // (2 * cp)
    first, second = start + rank * half, start + (2 * cp - 1 - rank) * half
    return torch.cat([torch.arange(first, first + half), torch.arange(second, second + half)])


def packed(values: Tensor, mask_BT: Tensor, where: Places, fill: Tensor | int = 0) -> Tensor:
    """This rank's part ``[n, ...]`` of ``values [B, T, ...]``; ``fill`` is what padding gets."""
    whole = torch.empty(where.starts[-1], *values.shape[2:], dtype=values.dtype)
    whole[:] = torch.as_tensor(fill, dtype=values.dtype)
    for row, start in enumerate(where.starts[:-1]):
        real = values[row, mask_BT[row]]
        whole[start : start + real.shape[0]] = real
    return whole[where.mine]


def unpacked(own: Tensor, mask_BT: Tensor, where: Places, group: Any) -> Tensor:
    """``[B, T]`` from every rank's ``[n]``; only this rank's values carry a gradient."""
    parts = [own]
    if where.all.shape[0] > 1:
        parts = [torch.empty_like(own) for _ in range(where.all.shape[0])]
        dist.all_gather(parts, own.detach().contiguous(), group=group)
        parts[dist.get_rank(group)] = own
    whole = own.new_zeros(where.starts[-1])
    whole = whole.index_copy(0, where.all.flatten().to(own.device), torch.cat(parts))
    out = own.new_zeros(mask_BT.shape)
    rows = [
        torch.nn.functional.pad(whole[start : start + n], (0, mask_BT.shape[1] - n))
        for start, n in zip(where.starts, mask_BT.sum(dim=1).tolist(), strict=False)
    ]
    return out + torch.stack(rows)
