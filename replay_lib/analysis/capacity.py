"""What a finite expert capacity drops, counted from the saved routes alone.

Which of an expert's tokens are dropped depends on their probabilities, which a model would have to
give; how many are dropped does not. Source: Megatron-Core ``moe_utils.get_capacity``.

Legend: N packed tokens of a micro-batch, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replay_lib.analysis.findings import Finding, Place, finding
from replay_lib.analysis.routes import RouterShape, seen_layers
from replay_lib.batch import RankBatch
from replay_lib.routing import compose_padding, expand_routes

#: The packed total is a multiple of this; its tail takes the experts 0..K-1 like all padding.
ALIGN = 128


@dataclass
class Dropped:
    """Choices (token, layer, expert) of one rank: all of them, and what capacity drops."""

    choices: int = 0
    dropped: int = 0
    real_least: int = 0  # dropped choices of real tokens, at least and at most
    real_most: int = 0
    without_padding: int = 0  # dropped where no padding went along


def check_capacity(
    batch: RankBatch,
    split: Sequence[Sequence[int]],
    file: Path,
    fields: Mapping[str, Any],
    shape: RouterShape,
) -> Iterator[Finding]:
    """One finding a rank: how many choices its micro-batches drop, with and without padding."""
    factor = fields.get("moe_expert_capacity_factor")
    if not isinstance(factor, int | float) or batch.merge_info is not None:
        return
    routes = [r for r in batch.routes if r is not None]
    if len(routes) != batch.rows:
        return  # told as missing routes
    routes = compose_padding(routes, batch.index)
    expanded_BTLK = seen_layers(expand_routes(routes, batch.attention_mask), shape)
    total = Dropped()
    for rows in split:
        _count(total, expanded_BTLK[list(rows)], batch.select(rows), shape.experts, float(factor))
    if total.dropped:
        found = (
            f"{total.dropped} of {total.choices} choices are dropped at capacity factor "
            f"{factor:g}, {total.real_least} to {total.real_most} of them of real tokens; without "
            f"padding rows and tails it would be {total.without_padding}"
        )
        yield finding("capacity-drops", file, found, Place(dp_rank=batch.dp_rank))


def _count(
    total: Dropped, routes_BTLK: Tensor, part: RankBatch, experts: int, factor: float
) -> None:
    mask_BT = part.attention_mask
    real_N = (mask_BT & (part.index >= 0).unsqueeze(1))[mask_BT]
    tokens_NLK = routes_BTLK[mask_BT].long()
    layers, topk = tokens_NLK.shape[1:]
    tail = -len(tokens_NLK) % ALIGN
    filler = torch.arange(topk).expand(tail, layers, topk)
    packed_NLK = torch.cat([tokens_NLK, filler])
    everybody_LE = _per_expert(packed_NLK, experts)
    real_LE = _per_expert(tokens_NLK[real_N], experts)
    over_LE = (everybody_LE - _capacity(len(packed_NLK), topk, experts, factor)).clamp(min=0)
    alone_LE = (real_LE - _capacity(int(real_N.sum()), topk, experts, factor)).clamp(min=0)
    padding_LE = everybody_LE - real_LE
    total.choices += packed_NLK.numel()
    total.dropped += int(over_LE.sum())
    total.real_least += int((over_LE - padding_LE).clamp(min=0).sum())
    total.real_most += int(torch.minimum(over_LE, real_LE).sum())
    total.without_padding += int(alone_LE.sum())


def _per_expert(tokens_NLK: Tensor, experts: int) -> Tensor:
    """Tokens of each layer and expert, int64 ``[L, E]``."""
    layers = tokens_NLK.shape[1]
    flat = tokens_NLK.transpose(0, 1).reshape(layers, -1)
    counts = torch.zeros(layers, experts, dtype=torch.int64)
    return counts.scatter_add(1, flat, torch.ones_like(flat))


def _capacity(tokens: int, topk: int, experts: int, factor: float) -> int:
    return math.ceil(tokens * topk / experts * factor)
