"""One micro-batch through the model: log-probabilities and entropies with their graph kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from replay_lib.engine.attention import Rows
from replay_lib.engine.inputs import MicroBatch
from replay_lib.engine.model import LiveModel
from replay_lib.engine.routes import PackedRoutes, replaying
from replay_lib.loss import GrpoSettings
from replay_lib.loss.logits import log_prob_and_entropy


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's packing parameters, with the row layout that our attention reads.

    Megatron is told of one sequence: it uses the lengths only to place rotary angles, which
    ``PackedRotary`` has placed already. They stay on the CPU, where Megatron reads them.
    """

    rows: Rows | None = field(default=None)


@dataclass(frozen=True)
class Forward:
    """Outputs of one micro-batch, ``[B, T]`` float32, zero outside the attention mask."""

    log_prob: Tensor
    entropy: Tensor


def forward(
    model: LiveModel, micro: MicroBatch, routes: PackedRoutes | None, settings: GrpoSettings
) -> Forward:
    """Run ``micro`` with ``routes`` forced (None: the model routes itself).

    The entropy is computed only where ``settings`` use it, as the trainer does; else it is zero.
    """
    with replaying(model, routes), _placed(model, micro):
        logits = model.module(
            input_ids=micro.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=_packing(micro),
        )
    log_prob, entropy = log_prob_and_entropy(logits[0], micro.labels, settings)
    return Forward(log_prob=_unpack(log_prob, micro), entropy=_unpack(entropy, micro))


def _unpack(packed: Tensor, micro: MicroBatch) -> Tensor:
    """``[N]`` to ``[B, T]`` by indices made beforehand: boolean indexing would stop the queue."""
    mask = micro.attention_mask
    return torch.where(mask, packed.index_select(0, micro.place).view(mask.shape), 0.0)


@contextlib.contextmanager
def _placed(model: LiveModel, micro: MicroBatch) -> Iterator[None]:
    if model.rotary is None:
        yield
        return
    model.rotary.rows = micro.layout
    try:
        yield
    finally:
        model.rotary.rows = None


def _packing(micro: MicroBatch) -> Any:
    whole = torch.tensor([0, micro.size], dtype=torch.int32)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=micro.size,
        max_seqlen_kv=micro.size,
        rows=micro.layout,
    )
