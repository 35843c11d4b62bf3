"""Methods that stop rows or tokens from training, on masks written out by hand."""

from __future__ import annotations

import pytest
import torch
from hand_made import METHODS, make_batch, on_batch

from replay_lib.errors import PatchError
from replay_lib.loss import GrpoSettings, micro_batch_loss


def kept(batch) -> list[list[int]]:
    return batch.loss_mask.int().tolist()


def test_rows_whose_advantage_stands_out_leave():
    # sizes 1, 2, 9 and a row without any: the median of the three is 2
    advantage = [[1.0, -0.5], [-2.0, 2.0], [9.0, 9.0], [0.0, 0.0]]
    batch = make_batch([[1, 1]] * 4, advantage=advantage)
    after = on_batch("mask-rows-by-advantage", batch, factor=3.0)
    assert kept(after) == [[1, 1], [1, 1], [0, 0], [1, 1]]
    assert kept(on_batch("mask-rows-by-advantage", batch, factor=4.5)) == kept(
        batch
    )  # 9 is not > 9


def test_a_masked_advantage_makes_no_outlier():
    batch = make_batch([[1, 0], [1, 1]], advantage=[[1.0, 99.0], [1.0, 1.0]])
    assert kept(on_batch("mask-rows-by-advantage", batch)) == kept(batch)


def test_a_rank_without_advantages_keeps_its_rows():
    batch = make_batch([[1, 1], [1, 1]])
    assert kept(on_batch("mask-rows-by-advantage", batch)) == kept(batch)


def test_long_rows_leave():
    # 1, 1 and 4 loss tokens, a padding row: the median of the three is 1
    rows = [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    after = on_batch("mask-long-rows", make_batch(rows))
    assert kept(after) == [rows[0], rows[1], [0, 0, 0, 0], rows[3]]
    assert kept(on_batch("mask-long-rows", make_batch(rows), factor=4.0)) == rows
    assert kept(on_batch("mask-long-rows", make_batch([[0, 0]]))) == [[0, 0]]


def test_improbable_rows_leave_by_the_mean_over_their_loss_tokens():
    old = [[-1.0, -9.0], [-2.5, -2.5], [-3.0, -0.9]]
    batch = make_batch([[1, 0], [1, 1], [1, 1]], old=old)  # means -1, -2.5, -1.95
    assert kept(on_batch("mask-improbable-rows", batch)) == [[1, 0], [0, 0], [1, 1]]


def test_improbable_tokens_leave_and_their_neighbours_stay():
    batch = make_batch([[1, 1, 1, 0]], old=[[-5.5, -5.0, -1.0, -9.0]])
    assert kept(on_batch("mask-improbable-tokens", batch)) == [[0, 1, 1, 0]]


def test_of_equal_rows_the_first_trains():
    batch = make_batch([[1, 1]] * 4, ids=[[3, 4], [3, 5], [3, 4], [3, 4]])
    assert kept(on_batch("mask-duplicated-rows", batch)) == [[1, 1], [1, 1], [0, 0], [0, 0]]


def test_padding_does_not_tell_rows_apart():
    batch = make_batch([[1, 0], [1, 0]], ids=[[3, 0], [3, 7]])
    mask = torch.tensor([[True, False], [True, False]])
    batch = batch.replace(attention_mask=mask)
    assert kept(on_batch("mask-duplicated-rows", batch)) == [[1, 0], [0, 0]]


@pytest.mark.parametrize(
    ("slug", "weights"),
    [
        # ratios old / rollout of the tokens: 0.4, 1, 3 in row 0; 1, 1, 1 in row 1
        ("mask-tokens-by-icepop", [[0, 1, 0], [1, 1, 1]]),
        # geometric means 1.2^(1/3) = 1.063 and 1
        ("mask-sequences-by-mismatch", [[0, 0, 0], [1, 1, 1]]),
        ("veto-sequences-by-token-mismatch:0.5", [[0, 0, 0], [1, 1, 1]]),
        ("veto-sequences-by-token-mismatch:0.3", [[1, 1, 1], [1, 1, 1]]),
        ("enable-token-mismatch-tis-below-one", [[0.4, 1, 1], [1, 1, 1]]),
        ("enable-token-mismatch-tis-max5", [[0.4, 1, 3], [1, 1, 1]]),
    ],
)
def test_policy_gradients_are_filtered_or_weighted(slug, weights):
    old = torch.log(torch.tensor([[0.2, 0.5, 0.6], [0.5, 0.5, 0.5]]))
    rollout = torch.log(torch.tensor([[0.5, 0.5, 0.2], [0.5, 0.5, 0.5]]))
    rows = make_batch([[1, 1, 1]] * 2, advantage=1.0, old=old, rollout=rollout)
    slug, _, threshold = slug.partition(":")
    (patch,) = METHODS[slug].patches({"threshold": float(threshold)} if threshold else {})

    def gradient(settings: GrpoSettings) -> torch.Tensor:
        log_prob = old.clone().requires_grad_()
        loss = micro_batch_loss(settings, rows, log_prob, torch.zeros(2, 3))
        return torch.autograd.grad(loss.scaled, log_prob)[0]

    plain, patched = gradient(GrpoSettings()), gradient(patch.apply(GrpoSettings()))
    assert bool((plain != 0).all())
    # float32 exp of a difference of logs
    assert torch.allclose(patched, plain * torch.tensor(weights), rtol=1e-6, atol=0)


def test_tokens_that_the_trainer_finds_likelier_weigh_more():
    (patch,) = METHODS["enable-token-mismatch-tis-above-one"].patches()
    old = torch.log(torch.tensor([[0.2, 0.5, 0.75, 0.9]]))
    rollout = torch.log(torch.tensor([[0.4, 0.5, 0.5, 0.3]]))
    rows = make_batch([[1, 1, 1, 1]], old=old, rollout=rollout)
    weights = patch.apply(torch.full((1, 4), 2.0), rows, old)
    # ratios 0.5, 1, 1.5, 3: at least 1, at most 2, times what was there
    assert torch.allclose(weights, torch.tensor([[2.0, 2.0, 3.0, 4.0]]), rtol=1e-6)


def test_the_rollouts_log_probabilities_come_near_the_old_ones():
    batch = make_batch([[1, 1, 0]], old=[[-1.0, -1.0, -1.0]], rollout=[[-1.05, -3.0, -9.0]])
    after = on_batch("clip-rollout-log-ratio", batch, bound=0.5)
    assert [round(x, 6) for x in after.rollout_logprobs[0].tolist()] == [-1.05, -1.5, -9.0]
    assert torch.equal(after.old_logprobs, batch.old_logprobs)


@pytest.mark.parametrize(
    ("slug", "params", "said"),
    [
        ("mask-tokens-by-icepop", {"low": 2.0, "high": 1.0}, "expected 0 <= low < high"),
        ("mask-sequences-by-mismatch", {"low": -0.1}, "expected 0 <= low < high"),
        ("veto-sequences-by-token-mismatch", {"threshold": 1.5}, "at most 1"),
        ("enable-token-mismatch-tis-above-one", {"clip_max": 0.5}, "expected >= 1"),
        ("clip-rollout-log-ratio", {"bound": 0.0}, "expected > 0"),
        ("mask-rows-by-advantage", {"factor": 0.0}, "expected > 0"),
        ("mask-long-rows", {"factor": -1.0}, "expected > 0"),
        ("mask-improbable-rows", {"nats": 0.0}, "expected > 0"),
        ("mask-improbable-tokens", {"nats": -2.0}, "expected > 0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(slug, params, said):
    with pytest.raises(PatchError, match=f"mitigation {slug}: found .*{said}"):
        METHODS[slug].patches(params)
