"""Rows of a padded batch laid end to end, as the trainer packs them for the model.

Real tokens of all rows follow each other; the last row is lengthened until the total is a
multiple of 128, so its attention sees a filled tail. One tensor- and context-parallel rank.
Source: AXRL ``pack_utils.preprocess_packed_seqs`` and ``postprocess_packed_seqs``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.errors import BatchError, fault


@dataclass(frozen=True, kw_only=True)
class Packed:
    """``values [N, ...]``; ``cu_seqlens`` int32 ``[B + 1]`` includes the last row's tail.

    ``lengths`` are the real tokens of each row, ``max_seqlen`` the longest row, tail included.
    """

    values: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    max_seqlen: int


def pack(
    rows: Tensor, attention_mask_BT: Tensor, align: int = 128, fill: float | Tensor = 0
) -> Packed:
    """Pack ``rows [B, T, ...]`` by the mask (bool ``[B, T]``; holes are removed).

    ``fill`` is the value of the tail, a number or a tensor of the shape of one token. Gradients
    pass. Raises BatchError for a mask of another shape and for a batch without rows.
    """
    mask_BT = _checked(attention_mask_BT, tuple(rows.shape[:2]))
    lengths = [int(n) for n in mask_BT.sum(dim=1).tolist()]
    tail = -sum(lengths) % align
    padded = [*lengths[:-1], lengths[-1] + tail]
    values = rows[mask_BT]
    if tail:
        filler = torch.as_tensor(fill, dtype=rows.dtype, device=rows.device)
        values = torch.cat([values, filler.expand(tail, *rows.shape[2:])])
    ends = torch.tensor([0, *padded]).cumsum(0)
    return Packed(
        values=values,
        cu_seqlens=ends.to(device=rows.device, dtype=torch.int32),
        lengths=tuple(lengths),
        max_seqlen=max(padded),
    )


def unpack(packed_values: Tensor, cu_seqlens: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """Back to ``[B, T, ...]`` from ``[N, ...]``: exact zeros off the mask. Gradients pass.

    Raises BatchError where ``cu_seqlens`` does not fit the mask or the packed length.
    """
    mask_BT = _checked(attention_mask_BT, tuple(attention_mask_BT.shape))
    _check_bounds(cu_seqlens.tolist(), mask_BT.sum(dim=1).tolist(), packed_values.shape[0])
    # the k-th real token of a row stands k places after the start of that row
    starts_B1 = cu_seqlens[:-1].to(torch.int64).unsqueeze(-1)
    place_BT = starts_B1 + mask_BT.cumsum(dim=1) - 1
    out = packed_values.new_zeros((*mask_BT.shape, *packed_values.shape[1:]))
    return out.index_put((mask_BT,), packed_values[place_BT[mask_BT]])


def _check_bounds(bounds: list[int], lengths: list[int], total: int) -> None:
    room = [end - start for start, end in itertools.pairwise(bounds)]
    fits = len(room) == len(lengths) and all(r >= n for r, n in zip(room, lengths, strict=True))
    if not (fits and bounds[0] == 0 and bounds[-1] == total):
        found = f"bounds {bounds} for {total} packed values"
        expected = f"room for rows of {lengths} tokens, from 0 to the end"
        raise BatchError(fault("packed batch", "cu_seqlens", found, expected))


def _checked(attention_mask_BT: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(attention_mask_BT.shape) != shape or len(shape) != 2 or shape[0] == 0:
        found = f"shape {list(attention_mask_BT.shape)} for rows of {list(shape)}"
        raise BatchError(fault("batch", "attention_mask", found, "[B, T] of the rows, B > 0"))
    return attention_mask_BT.bool()
