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
from replay_lib.engine.routes import PackedRoutes, Release, replaying
from replay_lib.engine.stages import Stage, receive_activation, send_activation, share_values
from replay_lib.engine.vocab import split_log_prob_and_entropy
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
    """Outputs of one micro-batch, ``[B, T]`` float32, zero outside the attention mask.

    They carry their graph, except where the model or the tokens are split over ranks: every rank
    has all values then, and ``stage`` is what it kept of the graph. See :func:`backward`.
    """

    log_prob: Tensor
    entropy: Tensor
    stage: Stage | None = None


def forward(
    model: LiveModel,
    micro: MicroBatch,
    routes: PackedRoutes | None,
    settings: GrpoSettings,
    release: Release | None = None,
) -> Forward:
    """Run ``micro`` with ``routes`` forced (None: the model routes itself), but where ``release``
    lets them go.

    The entropy is computed only where ``settings`` use it, as the trainer does; else it is zero.
    All ranks that share a model or its tokens call this together.
    """
    groups = model.groups
    entry = receive_activation(model, micro.size)
    with replaying(model, routes, release), _placed(model, micro):
        out = model.module(
            input_ids=micro.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=_packing(micro),
        )
    if not groups.last_stage:
        send_activation(out, groups)
        outputs: tuple[Tensor, ...] = (out,)
        values = share_values((), micro.size, groups, model.device)
    else:
        outputs = _log_prob_and_entropy(out[0], micro, settings, model)
        if groups.pp.size == groups.cp.size == 1:
            log_prob, entropy = (_unpack(x, micro) for x in outputs)
            return Forward(log_prob=log_prob, entropy=entropy)
        values = share_values(outputs, micro.size, groups, model.device)
    log_prob, entropy = (_unpack(x, micro) for x in values)
    return Forward(log_prob, entropy, Stage(outputs=outputs, entry=entry))


def _log_prob_and_entropy(
    logits: Tensor, micro: MicroBatch, settings: GrpoSettings, model: LiveModel
) -> tuple[Tensor, Tensor]:
    axis = model.groups.tp
    if axis.size == 1:
        return log_prob_and_entropy(logits, micro.labels, settings)
    return split_log_prob_and_entropy(logits, micro.labels, settings, axis)


def backward(
    model: LiveModel,
    micro: MicroBatch,
    out: Forward,
    grads: tuple[Tensor, Tensor | None],
    *,
    keep: bool,
) -> None:
    """Backpropagate ``grads`` of log-probabilities and entropies ``[B, T]`` into the parameters.

    ``keep`` leaves the graph for another backward. All ranks that share a model or its tokens
    call this together, each with the gradients of all values.
    """
    if out.stage is None:
        _backward((out.log_prob, out.entropy), grads, keep=keep)
    elif model.groups.last_stage:
        mine = tuple(None if g is None else _pack(g, micro) for g in grads)
        _backward(out.stage.outputs, mine, keep=keep)
        out.stage.send_back(model.groups)
    else:
        _backward(out.stage.outputs, (out.stage.gradient(model.groups),), keep=keep)
        out.stage.send_back(model.groups)


def _backward(outputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], *, keep: bool) -> None:
    pairs = zip(outputs, grads, strict=True)
    live = [(t, g) for t, g in pairs if t.requires_grad and g is not None]
    torch.autograd.backward([t for t, _ in live], [g for _, g in live], retain_graph=keep)


def _unpack(packed: Tensor, micro: MicroBatch) -> Tensor:
    """``[N]`` to ``[B, T]`` by indices made beforehand: boolean indexing would stop the queue."""
    mask = micro.attention_mask
    return torch.where(mask, packed.index_select(0, micro.place).view(mask.shape), 0.0)


def _pack(grad: Tensor, micro: MicroBatch) -> Tensor:
    """Gradient ``[B, T]`` to that of this rank's packed tokens ``[n]``: unpacking reversed."""
    real = torch.where(micro.attention_mask, grad, 0.0)
    total = micro.size * micro.part.context.size
    packed = grad.new_zeros(total).index_add_(0, micro.place, real.reshape(-1))
    return micro.part.read(packed)


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
