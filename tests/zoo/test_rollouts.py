"""From responses to a batch: advantages as AXRL's controller computes them, aligned columns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from replay_lib.routing import check_routes
from replay_lib.zoo.rollouts import Rollouts, group_advantages, make_batch
from replay_lib.zoo.sampler import Sampled
from replay_lib.zoo.task import encode, make_problem


def test_advantages_are_score_minus_mean_over_sample_deviation():
    scores = [1.0, 0.0, 1.0, 1.0]
    found = group_advantages(torch.tensor(scores), 4)
    expected = (np.array(scores) - 0.75) / (np.std(scores, ddof=1) + 1e-6)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)  # float32 of float64
    assert found.sum().item() == pytest.approx(0.0, abs=1e-6)


def test_a_group_without_deviation_gets_zeros_and_its_neighbour_does_not():
    found = group_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0]), 2)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2] > 0 > found[3]


def test_deviations_just_above_the_bound_are_divided_by_the_epsilon_too():
    found = group_advantages(torch.tensor([0.0, 2e-7]), 2)
    # mean 1e-7, deviation 1.41e-7: the 1e-6 rules
    assert found.tolist() == pytest.approx([-1e-7 / 1.1414e-6, 1e-7 / 1.1414e-6], rel=1e-3)


def test_advantages_are_clipped_at_five():
    scores = torch.zeros(64)
    scores[0] = 1.0  # 7.9 deviations above the mean of 64
    assert group_advantages(scores, 64)[0].item() == 5.0
    assert group_advantages(-scores, 64)[0].item() == -5.0


@pytest.fixture
def rollouts():
    problems = tuple(make_problem(random.Random(n)) for n in range(2))
    answers = [problems[0].answer, "70+", problems[1].answer, problems[1].answer[:-1] + "5"]
    sampled = []
    for row, answer in enumerate(answers):
        tokens = encode(answer)
        count = len(problems[row // 2].prompt) + len(tokens) - 1
        routes = torch.tensor([0, 1], dtype=torch.int16).expand(count, 3, 2).clone()
        sampled.append(Sampled(tokens, [-0.1 * (i + 1) for i in range(len(tokens))], routes))
    return Rollouts(problems, 2, tuple(sampled))


def test_scores_come_from_the_text(rollouts):
    assert rollouts.scores().tolist() == [1.0, 0.0, 1.0, 0.0]


def test_columns_are_aligned_with_the_label(rollouts):
    batch = make_batch(rollouts, rollouts.scores(), torch.tensor([1.0, -1.0, 0.5, -0.5]))
    assert batch.lengths() == [55, 40, 55, 55] and batch.width == 55
    for row, sampled in enumerate(rollouts.sampled):
        places = batch.loss_mask[row].nonzero().flatten()
        assert places.tolist() == list(range(36, 36 + len(sampled.tokens)))
        assert batch.labels[row, places].tolist() == sampled.tokens
        assert batch.input_ids[row, places + 1].tolist() == sampled.tokens
        assert batch.rollout_logprobs[row, places].tolist() == pytest.approx(sampled.log_probs)
    off = ~batch.loss_mask
    assert set(batch.labels[off].tolist()) == {-100}
    assert not batch.rollout_logprobs[off].any() and not batch.advantage[off].any()
    assert batch.advantage[2].unique().tolist() == [0.0, 0.5]
    assert batch.reward_baseline.tolist() == [0.5] * 4
    check_routes(list(batch.routes), batch.lengths(), layers=3, topk=2, experts=4, where="batch")
