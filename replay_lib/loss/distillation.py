"""On-policy distillation: a teacher's opinion of the sampled tokens enters the advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from replay_lib.errors import BatchError, fault
from replay_lib.loss.aggregate import aggregate
from replay_lib.loss.inputs import LossInputs
from replay_lib.loss.settings import GrpoSettings

#: Least mean |log-prob| of the student that its scale is divided by.
_LEAST_SCALE = 1e-6


@torch.no_grad()
def distil(settings: GrpoSettings, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
    """Inputs with the advantages that the teacher changed, and metrics; unchanged where it is off.

    On loss tokens ``A' = (1 - a) A - a clip(student - teacher)`` with ``a = opd_alpha`` and a clip
    to +-``reverse_kl_clip`` nats; elsewhere ``A' = A``. It comes before everything else, so the
    signs that clipping and filters see are those of ``A'``. No gradient passes.

    Raises BatchError where a log-probability of teacher or student on a loss token is not finite.
    Source: AXRL ``GrpoTrainer.apply_opd_to_advantages``.
    """
    if inputs.teacher_BT is None:
        return inputs, {}
    mask_BT = inputs.loss_mask_BT
    student_BT = _student(settings, inputs)
    _check_finite("teacher_logprobs", inputs.teacher_BT, mask_BT)
    _check_finite(settings.opd.student_logprob_source, student_BT, mask_BT)
    if settings.opd.normalize_student_logprob_scale:
        student_BT = student_BT * _scale(student_BT, inputs.teacher_BT, mask_BT)
    raw_BT = torch.where(mask_BT, student_BT - inputs.teacher_BT, torch.zeros_like(student_BT))
    bound = settings.opd.reverse_kl_clip
    reverse_kl_BT = raw_BT if bound is None else raw_BT.clamp(-bound, bound)
    share = settings.opd.opd_alpha
    mixed_BT = (1.0 - share) * inputs.advantage_BT - share * reverse_kl_BT
    advantage_BT = torch.where(mask_BT, mixed_BT, inputs.advantage_BT)
    clipped_BT = (reverse_kl_BT != raw_BT).to(raw_BT.dtype)
    metrics = {
        "opd/reverse_kl_mean": aggregate(reverse_kl_BT, mask_BT, "token-mean"),
        "opd/reverse_kl_clip_rate": aggregate(clipped_BT, mask_BT, "token-mean"),
        "opd/adjusted_advantage_mean": aggregate(advantage_BT, mask_BT, "token-mean"),
    }
    return inputs.with_advantage(advantage_BT), metrics


def _student(settings: GrpoSettings, inputs: LossInputs) -> Tensor:
    sources = {
        "rollout_logprobs": inputs.rollout_BT,
        "old_logprobs": inputs.old_BT,
        "cur_logprobs": inputs.log_prob_BT,
    }
    return sources[settings.opd.student_logprob_source].detach()


def _scale(student_BT: Tensor, teacher_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean |teacher| over mean |student|, on loss tokens; 0-d."""
    student = aggregate(student_BT.abs(), mask_BT, "token-mean")
    return aggregate(teacher_BT.abs(), mask_BT, "token-mean") / student.clamp_min(_LEAST_SCALE)


def _check_finite(name: str, value_BT: Tensor, mask_BT: Tensor) -> None:
    bad_BT = mask_BT & ~torch.isfinite(value_BT)
    if bool(bad_BT.any()):
        row, token = (int(i) for i in bad_BT.nonzero()[0])
        raise BatchError(
            fault(
                "on-policy distillation",
                f"{name}[{row}, {token}]",
                f"{float(value_BT[row, token])}",
                "a finite log-probability on every loss token",
                f"{int(bad_BT.sum())} of {int(mask_BT.sum())} loss tokens are not finite.",
            )
        )
