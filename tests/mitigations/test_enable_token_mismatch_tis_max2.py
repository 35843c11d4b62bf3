"""Token importance sampling between rollout engine and trainer, switched on by one setting."""

from __future__ import annotations

import math

import pytest
import torch

from replay_lib.batch import RankBatch
from replay_lib.errors import PatchError
from replay_lib.loss import GrpoSettings, micro_batch_loss
from replay_lib.methods import load_methods
from replay_lib.patch import Seam

METHOD = load_methods()["enable-token-mismatch-tis-max2"]


def patched(settings: GrpoSettings, **params) -> GrpoSettings:
    (patch,) = METHOD.patches(params)
    assert patch.seam is Seam.SETTINGS
    return patch.apply(settings)


def test_it_sets_the_cap_and_nothing_else():
    before = GrpoSettings()
    assert before.mismatch_token_clip_max is None
    assert patched(before) == before.replace(mismatch_token_clip_max=2.0)
    assert patched(before, clip_max=5).mismatch_token_clip_max == 5.0


@pytest.mark.parametrize("clip_max", [0.0, -1.0])
def test_a_cap_that_is_not_positive_is_refused(clip_max):
    with pytest.raises(PatchError, match=r"found clip_max=.*, expected > 0"):
        METHOD.patches({"clip_max": clip_max})


def test_policy_gradients_are_weighted_by_old_over_rollout_up_to_the_cap():
    # old / rollout of the four tokens: 1, 1/2, 3 (capped at 2), and a masked one
    rollout = torch.log(torch.tensor([[0.5, 0.5, 0.25, 0.5]]))
    old = torch.log(torch.tensor([[0.5, 0.25, 0.75, 0.125]]))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    rows = RankBatch(
        dp_rank=0,
        index=torch.zeros(1, dtype=torch.int64),
        input_ids=ids,
        labels=ids,
        loss_mask=torch.tensor([[True, True, True, False]]),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        advantage=torch.ones(1, 4),
        old_logprobs=old,
        rollout_logprobs=rollout,
        ref_logprobs=old,
    )
    settings = GrpoSettings(kl_control_alpha=0.0)

    def gradient(settings: GrpoSettings) -> list[float]:
        log_prob = old.clone().requires_grad_()
        loss = micro_batch_loss(settings, rows, log_prob, torch.zeros(1, 4))
        (grad,) = torch.autograd.grad(loss.scaled, log_prob)
        return grad[0].tolist()

    plain, weighted = gradient(settings), gradient(patched(settings))
    assert plain[0] == plain[1] == plain[2] != 0
    for before, after, weight in zip(plain[:3], weighted[:3], (1.0, 0.5, 2.0), strict=True):
        # float32 exp of a difference of logs
        assert math.isclose(after, before * weight, rel_tol=1e-6)
    assert weighted[3] == 0
