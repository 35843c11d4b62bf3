"""What the loss reads from a micro-batch, checked once: columns, shapes, dtype, device.

Source: the head of AXRL ``GrpoTrainer.loss_func`` and its assertions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError, fault
from replay_lib.loss.settings import GrpoSettings

READ_ALWAYS = (
    "labels",
    "loss_mask",
    "advantage",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
)


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """All ``[B, T]``, label-aligned, of the dtype of ``log_prob_BT``, log-probabilities in nats."""

    log_prob_BT: Tensor  # current policy, carries the gradient
    entropy_BT: Tensor  # nats, carries the gradient
    loss_mask_BT: Tensor  # bool
    advantage_BT: Tensor
    old_BT: Tensor
    rollout_BT: Tensor
    ref_BT: Tensor
    teacher_BT: Tensor | None
    turn_index_BT: Tensor | None  # int, -1 where not trainable
    token_weight_BT: Tensor | None

    def with_advantage(self, advantage_BT: Tensor) -> LossInputs:
        """The same with another advantage."""
        return replace(self, advantage_BT=advantage_BT)


def read_inputs(
    settings: GrpoSettings,
    rows: RankBatch,
    log_prob_BT: Tensor,
    entropy_BT: Tensor,
    token_weight_BT: Tensor | None = None,
) -> LossInputs:
    """Collect what the loss reads.

    Raises BatchError for an absent column (the trainer reads rollout, old and reference
    log-probabilities whatever its settings), and for shapes, dtypes or devices that do not fit;
    it names all that do not.
    """
    names = READ_ALWAYS + (("teacher_logprobs",) if settings.opd.enabled else ())
    columns = {name: rows.column(name) for name in names}
    if rows.turn_index is not None:
        columns["turn_index"] = rows.turn_index
    others = {"entropy": entropy_BT, "token_weight": token_weight_BT}
    named = columns | {name: value for name, value in others.items() if value is not None}
    where = f"batch of dp rank {rows.dp_rank}"
    _check_log_prob(where, log_prob_BT)
    _check_fit(where, log_prob_BT, named)

    def floats(name: str) -> Tensor:
        return columns[name].to(log_prob_BT.dtype)

    return LossInputs(
        log_prob_BT=log_prob_BT,
        entropy_BT=entropy_BT,
        loss_mask_BT=columns["loss_mask"].bool(),
        advantage_BT=floats("advantage"),
        old_BT=floats("old_logprobs"),
        rollout_BT=floats("rollout_logprobs"),
        ref_BT=floats("ref_logprobs"),
        teacher_BT=floats("teacher_logprobs") if settings.opd.enabled else None,
        turn_index_BT=rows.turn_index,
        token_weight_BT=None if token_weight_BT is None else token_weight_BT.to(log_prob_BT.dtype),
    )


def _check_log_prob(where: str, log_prob_BT: Tensor) -> None:
    if log_prob_BT.dtype not in (torch.float32, torch.float64):
        raise BatchError(
            fault(
                where,
                "log_prob",
                str(log_prob_BT.dtype),
                "torch.float32 (the trainer's) or torch.float64 (the reference's)",
                "Convert the logits, not the log-probabilities: their rounding is the loss.",
            )
        )
    if log_prob_BT.dim() != 2:
        found, expected = f"{log_prob_BT.dim()} dimensions", "two, rows and tokens"
        raise BatchError(fault(where, "log_prob", found, expected))


def _check_fit(where: str, log_prob_BT: Tensor, named: dict[str, Tensor]) -> None:
    expected = (tuple(log_prob_BT.shape), str(log_prob_BT.device))
    found = {name: (tuple(t.shape), str(t.device)) for name, t in named.items()}
    odd = {name: place for name, place in found.items() if place != expected}
    if odd:
        listed = "; ".join(f"{name} {list(s)} on {d}" for name, (s, d) in odd.items())
        shape, device = expected
        raise BatchError(fault(where, None, listed, f"{list(shape)} on {device}, as log_prob"))
