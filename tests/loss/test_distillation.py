"""A teacher's share of the advantages."""

from __future__ import annotations

import pytest
import torch
from loss_batches import make_rows

from replay_lib.errors import BatchError
from replay_lib.loss import GrpoSettings, micro_batch_loss

STUDENT = torch.tensor([[-1.0, -2.0, -30.0, -5.0]])
MASK = [[1, 1, 1, 0]]


def advantages(teacher, rows=None, **opd) -> list[float]:
    rows = rows or make_rows(MASK, advantage=2.0, teacher_logprobs=teacher)
    settings = GrpoSettings(opd={"enabled": True, **opd})
    result = micro_batch_loss(settings, rows, STUDENT, torch.zeros(1, 4))
    assert not result.advantage_BT.requires_grad
    return result.advantage_BT[0].tolist()


def test_loss_tokens_mix_advantage_and_clipped_reverse_kl():
    found = advantages([[-2.0, -1.0, -2.0, -1.0]], opd_alpha=0.25, reverse_kl_clip=10.0)
    # student - teacher is 1, -1, -28 (clipped to -10)
    assert found == pytest.approx([1.5 - 0.25, 1.5 + 0.25, 1.5 + 2.5, 2.0])


def test_the_clip_can_be_off():
    found = advantages([[-2.0, -1.0, -2.0, -1.0]], opd_alpha=0.25, reverse_kl_clip=None)
    assert found[2] == pytest.approx(1.5 + 7.0)


def test_the_students_scale_can_be_matched_to_the_teachers():
    found = advantages(
        [[-11.0, -11.0, -11.0, 0.0]], opd_alpha=1.0, normalize_student_logprob_scale=True
    )
    # mean |student| and |teacher| are 11: nothing to scale
    assert found == pytest.approx([-10.0, -9.0, 10.0, 2.0])


@pytest.mark.parametrize(
    ("source", "column"), [("old_logprobs", "old_logprobs"), ("rollout_logprobs",) * 2]
)
def test_the_student_may_be_a_saved_policy(source, column):
    columns = {"teacher_logprobs": -1.0, "advantage": 0.0, column: -4.0}
    rows = make_rows(MASK, **columns)
    found = advantages(None, rows, opd_alpha=0.5, student_logprob_source=source)
    assert found == pytest.approx([1.5, 1.5, 1.5, 0.0])


def test_off_it_changes_nothing_and_needs_no_teacher():
    rows = make_rows(MASK, advantage=2.0)
    result = micro_batch_loss(GrpoSettings(), rows, STUDENT, torch.zeros(1, 4))
    assert torch.equal(result.advantage_BT, rows.advantage)
    assert not any(name.startswith("opd/") for name in result.metrics)


def test_an_absent_teacher_is_an_error():
    rows = make_rows(MASK)
    with pytest.raises(BatchError, match="column 'teacher_logprobs' is absent"):
        advantages(None, rows)


def test_a_teacher_that_is_not_finite_on_a_loss_token_is_an_error():
    with pytest.raises(BatchError) as error:
        advantages([[-1.0, float("-inf"), -1.0, -1.0]])
    assert str(error.value) == (
        "on-policy distillation: teacher_logprobs[0, 1]: found -inf, expected a finite "
        "log-probability on every loss token. 1 of 3 loss tokens are not finite."
    )
    off_the_mask = advantages([[-1.0, -1.0, -1.0, float("nan")]])
    assert off_the_mask[3] == 2.0


def test_the_students_scale_is_a_quotient_of_means():
    rows = make_rows(MASK, advantage=0.0, teacher_logprobs=[[-1.0, -1.0, -3.0, -9.0]])
    options = {"student_logprob_source": "old_logprobs", "normalize_student_logprob_scale": True}
    rows = rows.replace(old_logprobs=torch.tensor([[-0.25, -0.5, -0.25, -7.0]]))
    found = advantages(None, rows, opd_alpha=1.0, reverse_kl_clip=None, **options)
    # mean |teacher| is 5/3, mean |student| 1/3: the student times 5, minus the teacher, negated
    assert found == pytest.approx([0.25, 1.5, -1.75, 0.0])


def test_a_student_that_is_certain_has_a_finite_scale():
    rows = make_rows(MASK, advantage=0.0, teacher_logprobs=-1.0, old_logprobs=0.0)
    options = {"student_logprob_source": "old_logprobs", "normalize_student_logprob_scale": True}
    assert advantages(None, rows, opd_alpha=1.0, **options) == [-1.0, -1.0, -1.0, 0.0]


def test_clips_on_both_sides_are_counted():
    rows = make_rows(MASK, advantage=0.0, teacher_logprobs=[[-21.0, -2.0, -2.0, -1.0]])
    settings = GrpoSettings(opd={"enabled": True, "opd_alpha": 0.5})
    metrics = micro_batch_loss(settings, rows, STUDENT, torch.zeros(1, 4)).metrics
    # student - teacher is 20, 0, -28, clipped to 10, 0, -10
    assert metrics["opd/reverse_kl_clip_rate"] == pytest.approx(2 / 3)
    assert metrics["opd/reverse_kl_mean"] == pytest.approx(0.0)
    assert metrics["opd/adjusted_advantage_mean"] == pytest.approx(0.0)


def test_the_first_token_that_is_not_finite_is_named():
    rows = make_rows([[0, 1], [1, 1]], teacher_logprobs=[[float("nan"), -1.0], [float("inf")] * 2])
    settings = GrpoSettings(opd={"enabled": True})
    with pytest.raises(
        BatchError, match=r"teacher_logprobs\[1, 0\]: found inf.* 2 of 3 loss tokens"
    ):
        micro_batch_loss(settings, rows, torch.full((2, 2), -1.0), torch.zeros(2, 2))
