"""One training step: Megatron's schedule over the micro-batches, its norm, its clipping.

Legend: B rows, T padded width, n packed tokens of this rank, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.loss import GrpoSettings, micro_batch_loss
from replay_lib.loss.logits import log_prob_and_entropy
from replay_lib.routing import expand_routes
from replay_lib.zoo.native.packing import Places, packed, places, unpacked


@dataclass
class RowPacking(PackedSeqParams):
    """Megatron's packing parameters, with what our attention kernel reads."""

    places: Places | None = field(default=None)
    ranks: Any = field(default=None)  # the context-parallel group


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step is computed from. ``routes`` says whether saved experts are forced."""

    batch: RankBatch
    split: Sequence[Sequence[int]]
    settings: GrpoSettings
    moe_layers: tuple[bool, ...]
    routes: bool
    device: torch.device


def run_step(chunks: list[Any], optimizer: Any, step: Step) -> float:
    """Forward and backward over all micro-batches, then clipping; the norm before clipping.

    Afterwards gradients (``main_grad``) are summed, divided by the total denominators and clipped,
    as in the trainer's ``train_step`` at the moment in which it writes a snapshot.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()

    def forward_step(micro_batches: Iterator[list[int]], chunk: Any) -> tuple[Any, Any]:
        return _forward(step, next(micro_batches), chunk)

    split = [list(rows) for rows in step.split]
    feeds = [iter(split) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=feeds if len(chunks) > 1 else feeds[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(split),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    if optimizer.prepare_grads():
        return float("nan")
    norm = float(optimizer.get_grad_norm())
    _clip(optimizer, norm)
    return norm


def _clip(optimizer: Any, norm: float) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)


def _forward(step: Step, rows: list[int], chunk: Any) -> tuple[Any, Any]:
    batch = step.batch.select(rows)
    cp_group = parallel_state.get_context_parallel_group()
    where = places(
        batch.lengths(),
        parallel_state.get_tensor_model_parallel_world_size(),
        cp_group.size(),
        cp_group.rank(),
    )
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    routers = [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    if step.routes:
        _force(model, step, batch, where)
    out = chunk(
        input_ids=packed(batch.input_ids, batch.attention_mask, where)[None].to(step.device),
        position_ids=None,
        attention_mask=None,
        packed_seq_params=_packing(where, cp_group),
    )
    for router in routers if step.routes else ():
        router.router_replay.clear_router_replay_action()
        router.router_replay.clear_indices()
    if model.post_process:
        out = _read_out(out, batch, where, step)
    return out, lambda made: _loss(made, batch, step)


def _packing(where: Places, cp_group: Any) -> RowPacking:
    ends = torch.tensor(where.starts, dtype=torch.int32)
    longest = max(b - a for a, b in zip(where.starts, where.starts[1:], strict=False))
    return RowPacking(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        places=where,
        ranks=cp_group,
    )


def _force(model: Any, step: Step, batch: RankBatch, where: Places) -> None:
    """Hand every router of this chunk the saved experts of the tokens that it will see."""
    routes = [r for r in batch.routes if r is not None]
    moe = [i for i, is_moe in enumerate(step.moe_layers) if is_moe]
    if routes[0].shape[1] == len(step.moe_layers):
        routes = [r[:, moe] for r in routes]
    experts_BTLK = expand_routes(routes, batch.attention_mask)
    fill = torch.arange(experts_BTLK.shape[-1])
    experts = packed(experts_BTLK, batch.attention_mask, where, fill)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    experts = experts.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()].to(step.device)
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "router"):
            number = moe.index(layer.layer_number - 1)
            replay = layer.mlp.router.router_replay
            replay.set_target_indices(experts[:, number].long())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def _read_out(logits: Tensor, batch: RankBatch, where: Places, step: Step) -> dict[str, Tensor]:
    """Log-probability of each label and entropy, ``[B, T]``, zero off the attention mask."""
    own = logits[0].float()
    labels = packed(batch.labels, batch.attention_mask, where).to(own.device)
    entropy = torch.zeros(own.shape[0], device=own.device)
    if step.settings.wants_entropy:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(own)
        _, entropy = log_prob_and_entropy(whole, labels, step.settings)
    # Megatron's function writes into what it is given
    log_prob = -tensor_parallel.vocab_parallel_cross_entropy(own.clone()[:, None], labels[:, None])
    mask = batch.attention_mask.to(own.device)
    group = parallel_state.get_context_parallel_group()
    found = {"log_prob": log_prob[:, 0], "entropy": entropy}
    return {name: unpacked(value, mask, where, group) for name, value in found.items()}


def _loss(made: dict[str, Tensor], batch: RankBatch, step: Step) -> tuple[Tensor, Tensor, Any]:
    rows = batch.to(made["log_prob"].device)
    loss = micro_batch_loss(step.settings, rows, made["log_prob"], made["entropy"])
    scaled = loss.scaled * parallel_state.get_context_parallel_world_size()
    return scaled, loss.denominator, loss.metrics
