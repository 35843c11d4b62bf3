"""One micro-batch through the model: log-probabilities and entropies with their graph kept."""

from __future__ import annotations

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

    The cumulative lengths stay on the CPU: Megatron reads them there, once a layer, to place
    rotary frequencies, and a copy back from the device would stop the queue each time.
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
    with replaying(model, routes):
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


def _packing(micro: MicroBatch) -> Any:
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=micro.starts,
        cu_seqlens_kv=micro.starts,
        cu_seqlens_q_padded=micro.starts,
        cu_seqlens_kv_padded=micro.starts,
        max_seqlen_q=micro.layout.longest,
        max_seqlen_kv=micro.layout.longest,
        rows=micro.layout,
    )
