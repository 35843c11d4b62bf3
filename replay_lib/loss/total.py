"""The whole loss of one micro-batch: what the trainer hands to backward.

    policy term x weights --aggregate--+
    KL term x kl_control_alpha --------+-- loss --x denominator--> scaled
    entropy term x alpha --------------+

Gradients of ``scaled`` are summed over micro-batches and ranks and divided once by the sum of the
denominators. Source: AXRL ``GrpoTrainer.loss_func``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.loss.aggregate import aggregate
from replay_lib.loss.control import entropy_term, kl_term
from replay_lib.loss.denominator import micro_batch_denominator
from replay_lib.loss.distillation import distil
from replay_lib.loss.filters import PolicyFilter, policy_filter
from replay_lib.loss.inputs import LossInputs, read_inputs
from replay_lib.loss.policy import PolicyTerm, policy_term
from replay_lib.loss.settings import GrpoSettings

#: A ratio is counted as clipped in the metrics when clipping moved it by more than this.
_CLIPPED = 1e-4


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoss:
    """The loss of one micro-batch and what it was made of; ``[B, T]`` tensors are detached."""

    loss: Tensor  # 0-d, aggregated by loss_agg_type, carries the gradient
    denominator: Tensor  # 0-d int32
    scaled: Tensor  # 0-d, loss * denominator: call backward on this
    keep_BT: Tensor  # bool: loss tokens that pass every filter
    policy_weight_BT: Tensor  # capped mismatch x keep x token weight
    advantage_BT: Tensor  # after on-policy distillation
    read_metrics: Callable[[], dict[str, float]]

    @property
    def metrics(self) -> dict[str, float]:
        """By AXRL's names; computed when they are asked for, which a replay never does."""
        return self.read_metrics()


def micro_batch_loss(
    settings: GrpoSettings,
    rows: RankBatch,
    log_prob_BT: Tensor,
    entropy_BT: Tensor,
    token_weight_BT: Tensor | None = None,
) -> MicroBatchLoss:
    """Loss of the micro-batch ``rows`` under ``settings``.

    ``log_prob_BT`` (of the labels, nats) and ``entropy_BT`` are ``[B, T]``, float32 as in the
    trainer or float64; everything is computed in that dtype on that device. ``token_weight_BT``
    multiplies the policy term and nothing else.

    A micro-batch without loss tokens is no error: loss 0, denominator 0. NaN and infinities come
    out as the trainer would give them. Raises SettingsError for contradicting settings and
    BatchError for columns that are absent or do not fit.
    """
    inputs = read_inputs(settings, rows, log_prob_BT, entropy_BT, token_weight_BT)
    settings.check()
    inputs, metrics = distil(settings, inputs)
    kept = policy_filter(settings, inputs)
    weight_BT = kept.policy_weight_BT
    if inputs.token_weight_BT is not None:
        weight_BT = weight_BT * inputs.token_weight_BT.detach()
    term = policy_term(settings, inputs)
    mask_BT = inputs.loss_mask_BT
    policy = aggregate(term.loss_BT * weight_BT, mask_BT, settings.loss_agg_type)
    squared, entropy = entropy_term(settings, inputs)
    kl = kl_term(settings, inputs)
    loss = policy + squared * settings.entropy_control.alpha + kl * settings.kl_control_alpha
    denominator = micro_batch_denominator(settings, mask_BT, inputs.turn_index_BT)
    keep_BT = mask_BT & kept.keep_BT

    def read_metrics() -> dict[str, float]:
        own = {
            "loss": loss,
            "pg_loss": policy,
            "kl_loss": kl,
            "entropy_loss": squared,
            "control_entropy": entropy,
            "denom": denominator,
            "loss_mask_sum": mask_BT.sum(),
            "policy_loss_mask_sum": keep_BT.sum(),
            **_filter_metrics(inputs, kept),
            **_ratio_metrics(term, keep_BT),
        }
        return _read_out(metrics | own)

    return MicroBatchLoss(
        loss=loss,
        denominator=denominator,
        scaled=loss * denominator,
        keep_BT=keep_BT,
        policy_weight_BT=weight_BT * mask_BT,
        advantage_BT=inputs.advantage_BT,
        read_metrics=read_metrics,
    )


def _filter_metrics(inputs: LossInputs, kept: PolicyFilter) -> dict[str, Tensor]:
    """Shares of loss tokens that each filter keeps, and the share whose weight is capped."""
    mask_BT = inputs.loss_mask_BT
    shares = {
        "token_mismatch_ir_clip_rate__all": kept.capped_BT,
        "icepop_keep_ratio__all": kept.icepop_BT,
        "seq_mask_low_keep_rate__all": kept.low_B1,
        "seq_mask_high_keep_rate__all": kept.high_B1,
        "seq_mask_veto_keep_rate__all": kept.veto_B1,
        "seq_mask_keep_rate__all": kept.sequence_B1,
    }
    return {name: _share(hit, mask_BT) for name, hit in shares.items()}


def _ratio_metrics(term: PolicyTerm, keep_BT: Tensor) -> dict[str, Tensor]:
    """Largest and smallest ratio and the clipped share, over the tokens that survive filters."""
    clipped_BT = (term.clipped_BT - term.ratio_BT).abs() > _CLIPPED
    return {
        "clip_frac__all": _share(clipped_BT, keep_BT),
        "ratio_max": aggregate(term.ratio_BT, keep_BT, "token-max"),
        "ratio_min": aggregate(term.ratio_BT, keep_BT, "token-min"),
    }


def _share(hit: Tensor, mask_BT: Tensor) -> Tensor:
    return aggregate(hit.to(torch.float32).expand(mask_BT.shape), mask_BT, "token-mean")


def _read_out(metrics: dict[str, Tensor]) -> dict[str, float]:
    # one transfer for all of them: on a GPU each single read would wait for the device
    values = torch.stack([value.detach().to(torch.float64) for value in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))
