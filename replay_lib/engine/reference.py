"""The oracle: one whole training step in float64, independent of the engine.

From the same inputs as the engine (weights by checkpoint name, recorded batches, loss settings,
micro-batch partition, where saved routes are forced) to gradients. Only the loss is shared; the
engine's packing, routing, folding and sharding are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.reference_model import (
    ReferenceModel,
    auxiliary_loss,
    log_prob_and_entropy,
    logits,
    read_model,
)
from replay_lib.engine.reference_trees import unmerged_batch
from replay_lib.errors import BatchError, UnsupportedModelError, WeightsError, fault
from replay_lib.loss import GrpoSettings, micro_batch_loss


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """What the step gave. Gradients are float64, before clipping, by checkpoint name.

    ``loss`` is the sum of scaled losses divided by ``denominator``. ``log_prob`` holds ``[B, T]``
    a rank, 0 outside the attention mask.
    """

    gradients: dict[str, Tensor]
    grad_norm_preclip: float
    param_norms: dict[str, float]
    loss: float
    denominator: float
    log_prob: tuple[Tensor, ...]


def reference_step(
    weights: Mapping[str, Tensor],
    model_fields: Mapping[str, Any],
    batches: Sequence[RankBatch],
    settings: GrpoSettings,
    partition: Sequence[Sequence[Sequence[int]]],
    *,
    replayed: Sequence[Tensor] | None = None,
    token_weights: Sequence[Tensor] | None = None,
) -> ReferenceStep:
    """Gradients of one training step over all recorded data-parallel ranks.

    ``partition[rank][i]`` are the rows of micro-batch ``i``. ``replayed[rank]`` is bool
    ``[B, T, L]``, L counting MoE layers: where saved routes are forced; by default at every real
    token of a row that has routes. ``token_weights[rank]`` is ``[B, T]`` and multiplies the policy
    loss.

    gradient = (sum over ranks and micro-batches of d scaled / d parameter) / sum of denominators.

    Raises UnsupportedModelError for a model it does not cover, WeightsError for parameters that
    are missing or unused, BatchError where a route is to be forced that a row does not have, and
    for a partition that does not hold every row once. Merged rows are taken apart into their paths.
    """
    model = read_model(model_fields)
    leaves = {n: t.detach().to(torch.float64).requires_grad_() for n, t in weights.items()}
    sums: dict[str, Tensor] = {}
    log_probs: list[Tensor] = []
    loss, denominator = 0.0, 0.0
    for rank, (batch, micro_batches) in enumerate(zip(batches, partition, strict=True)):
        _check_batch(batch, micro_batches)
        forced = replayed[rank] if replayed is not None else _everywhere(batch, model)
        log_prob_BT = torch.zeros(batch.rows, batch.width, dtype=torch.float64)
        for micro_batch in micro_batches:
            rows = list(micro_batch)
            piece = batch.select(rows)
            weight_BT = token_weights[rank][rows] if token_weights is not None else None
            top_k = settings.entropy_control.top_k
            log_prob, entropy = _forward(model, leaves, piece, forced[rows], top_k)
            result = micro_batch_loss(settings, piece, log_prob, entropy, weight_BT)
            _accumulate(
                sums, leaves, result.scaled + _auxiliary(model, leaves, piece, forced[rows])
            )
            log_prob_BT[rows] = log_prob.detach()
            loss += float(result.scaled.detach())
            denominator += float(result.denominator)
        log_probs.append(log_prob_BT)
    return _finish(leaves, sums, loss, denominator, tuple(log_probs))


def _everywhere(batch: RankBatch, model: ReferenceModel) -> Tensor:
    """bool [B, T, L]: every real token of the rows that have routes."""
    merged = batch.merge_info or (None,) * batch.rows
    routes = batch.routes or (None,) * batch.rows
    has_B = torch.tensor(
        [r is not None or bool(m and m.path_routes) for r, m in zip(routes, merged, strict=True)]
    )
    forced_BT = batch.attention_mask.bool() & has_B[:, None]
    return forced_BT[:, :, None].expand(-1, -1, len(model.moe_layers))


def _forward(
    model: ReferenceModel,
    leaves: Mapping[str, Tensor],
    rows: RankBatch,
    forced_BTL: Tensor,
    entropy_top_k: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy ``[B, T]``, 0 outside the attention mask.

    Rows that are prefix trees go through the model path by path.
    """
    if any(merged is not None for merged in rows.merge_info or ()):
        apart = unmerged_batch(rows)
        outputs = _forward(model, leaves, apart.batch, apart.spread(forced_BTL), entropy_top_k)
        log_prob, entropy = (
            torch.where(rows.attention_mask, apart.gather(x), x.new_zeros(())) for x in outputs
        )
        return log_prob, entropy
    saved_BTLK = _saved_experts(model, rows, forced_BTL)
    logits_BTV = logits(model, leaves, rows.input_ids, saved_BTLK, forced_BTL)
    log_prob, entropy = log_prob_and_entropy(logits_BTV, rows.labels, entropy_top_k)
    real_BT = rows.attention_mask.bool()
    nothing = log_prob.new_zeros(())
    return torch.where(real_BT, log_prob, nothing), torch.where(real_BT, entropy, nothing)


def _auxiliary(
    model: ReferenceModel, leaves: Mapping[str, Tensor], rows: RankBatch, forced_BTL: Tensor
) -> Tensor:
    """Losses of the routers over a micro-batch; 0 where the model has none.

    They count every packed token: the zeros behind the last row too, up to a multiple of 128.
    """
    if not (model.aux_coeff or model.z_coeff):
        return torch.zeros((), dtype=torch.float64)
    if any(merged is not None for merged in rows.merge_info or ()):
        raise UnsupportedModelError(
            fault("model section", "moe_aux_loss_coeff", "set", "none beside merged rows")
        )
    lengths = rows.lengths()
    tail = -sum(lengths) % 128
    more = max(lengths[-1] + tail - rows.width, 0)
    real_BT = torch.nn.functional.pad(rows.attention_mask.bool(), (0, more))
    counted_BT = real_BT.clone()
    counted_BT[-1, : lengths[-1] + tail] = True
    ids_BT = torch.nn.functional.pad(rows.input_ids * rows.attention_mask, (0, more))
    forced = torch.nn.functional.pad(forced_BTL, (0, 0, 0, more))
    # the tail is forced to 0..K-1 in each layer that forces every real token
    forced = torch.where(real_BT[:, :, None], forced, forced[real_BT].all(dim=0))
    first = torch.arange(model.topk).expand(*ids_BT.shape, model.layers, -1).clone()
    first[:, : rows.width] = _saved_experts(model, rows, forced_BTL)
    routers: list[Tensor] = []
    logits(model, leaves, ids_BT, first, forced, routers=routers)
    losses = [auxiliary_loss(model, router, counted_BT) for router in routers]
    return torch.stack(losses).sum()


def _saved_experts(model: ReferenceModel, rows: RankBatch, forced_BTL: Tensor) -> Tensor:
    """int64 [B, T, layers, K]; row i of the routes is token i, all else is 0..K-1.

    The trainer puts 0..K-1 at the last real token too: it has no saved route and never trains.
    """
    shape = (rows.rows, rows.width, model.layers, model.topk)
    saved_BTLK = torch.arange(model.topk).expand(shape).clone()
    for row in range(rows.rows):
        routes = rows.routes[row] if rows.routes else None
        if routes is not None:
            saved_BTLK[row, : routes.shape[0]] = routes.long()
        elif forced_BTL[row].any():
            where = f"batch of dp rank {rows.dp_rank}"
            raise BatchError(fault(where, f"routes[{row}]", "none", "routes to be forced"))
    return saved_BTLK


def _check_batch(batch: RankBatch, micro_batches: Sequence[Sequence[int]]) -> None:
    rows = sorted(r for micro_batch in micro_batches for r in micro_batch)
    if rows != list(range(batch.rows)):
        where = f"partition of dp rank {batch.dp_rank}"
        raise BatchError(fault(where, "rows", f"{rows}", f"each of 0..{batch.rows - 1} once"))


def _accumulate(sums: dict[str, Tensor], leaves: Mapping[str, Tensor], scaled: Tensor) -> None:
    grads = torch.autograd.grad(scaled, list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads, strict=True):
        if grad is not None:
            sums[name] = sums[name] + grad if name in sums else grad


def _finish(
    leaves: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
    loss: float,
    denominator: float,
    log_probs: tuple[Tensor, ...],
) -> ReferenceStep:
    unused = sorted(set(leaves) - set(sums))
    if unused:
        raise WeightsError(fault("weights", None, ", ".join(unused), "parameters of the model"))
    # an empty step has denominator 0 and gradients 0, which the trainer leaves undivided
    divisor = denominator if denominator > 0 else 1.0
    gradients = {name: sums[name] / divisor for name in leaves}
    param_norms = {name: float(g.norm()) for name, g in gradients.items()}
    return ReferenceStep(
        gradients=gradients,
        grad_norm_preclip=float(
            torch.tensor(list(param_norms.values()), dtype=torch.float64).norm()
        ),
        param_norms=param_norms,
        loss=loss / divisor,
        denominator=denominator,
        log_prob=log_probs,
    )
