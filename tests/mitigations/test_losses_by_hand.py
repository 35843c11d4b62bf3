"""What methods that set something in the loss do to its gradient, reckoned by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hand_made import make_batch, only_patch
from torch import Tensor

from replay_lib.loss import GrpoSettings, micro_batch_loss

MASK = [[1, 1], [1, 0]]  # three loss tokens a, b, c in two rows
ADVANTAGE = [[1.0, 1.0], [-1.0, 0.0]]
CURRENT = [[0.6, 0.45], [0.8, 0.5]]
OLD = [[0.4, 0.5], [0.2, 0.5]]  # current / old: 1.5, 0.9 and 4
ROLLOUT = [[0.5, 0.9], [0.8, 0.5]]  # current / rollout: 1.2, 0.5 and 1
REFERENCE = [[0.3, 0.45], [0.4, 0.5]]  # log(current / reference): log 2, 0 and log 2
ENTROPY = [[0.3, 0.6], [0.6, 9.0]]  # mean 0.5 over loss tokens
SEQUENCE = math.sqrt(1.5 * 0.9)  # geometric mean of the first row's ratios

#: Without a method (grpo2): a moved up beyond 1.28 and is cut, b weighs its ratio, c stops at 3.
PLAIN = (0.0, -0.9, 3.0)
#: Settings before the method where they are not the defaults, and d loss / d log_prob of a, b, c
#: after it. The loss is a mean over the three tokens times the three tokens of the denominator.
BY_HAND: dict[str, tuple[dict[str, object], tuple[float, float, float]]] = {
    "add-kl-to-reference": ({}, (0.01 * math.log(2), -0.9, 3.0 + 0.01 * math.log(2))),
    # soft clip at 1.5 in place of 3
    "tighten-dual-clip": ({}, (0.0, -0.9, 1.5)),
    # tis clips every weight: into 0.9 .. 1.1 in place of 0.8 .. 1.28
    "tighten-ratio-clip": ({"loss_type": "tis"}, (-1.1, -0.9, 1.1)),
    # a is cut at 1.28; c's -A r = 4 is more than the dual clip's 3, a constant
    "use-grpo-loss": ({}, (0.0, -0.9, 0.0)),
    # one ratio a row; mean of the rows' means, times three tokens: 3/4, 3/4 and 3/2 of it
    "use-gspo-loss": ({}, (-0.75 * SEQUENCE, -0.75 * SEQUENCE, 6.0)),
    # ratios to the rollout: 1.2 is inside, 0.5 is cut, 1 is inside
    "use-kimi-loss": ({"mismatch_token_clip_max": 1.0}, (-1.2, 0.0, 1.0)),
    "use-old-logprobs-as-ratio-base": ({"is_base_logprobs": "rollout_logprobs"}, PLAIN),
    "use-rollout-logprobs-as-ratio-base": ({}, (-1.2, -0.5, 1.0)),
    # two rows in place of three tokens
    "use-sequence-denominator": ({}, (0.0, -0.6, 2.0)),
    "use-sequence-turn-denominator": ({}, (0.0, -0.6, 2.0)),
    # 3/4, 3/4 and 3/2 as above
    "use-sequence-mean-aggregation": ({}, (0.0, -0.675, 4.5)),
    "use-tis-loss": ({}, (-1.28, -0.9, 1.28)),
    # weight 1 where A >= 0, at most 1 elsewhere
    "use-topr-loss": ({}, (-1.0, -1.0, 1.0)),
}


def gradients(settings: GrpoSettings) -> tuple[list[float], list[float]]:
    """Of the scaled loss after log-probabilities and after entropies, of the three tokens."""

    def logs(values: list[list[float]]) -> Tensor:
        return torch.log(torch.tensor(values))

    batch = make_batch(MASK, advantage=ADVANTAGE, old=logs(OLD), rollout=logs(ROLLOUT))
    batch = batch.replace(ref_logprobs=logs(REFERENCE))
    log_prob, entropy = logs(CURRENT).requires_grad_(), torch.tensor(ENTROPY).requires_grad_()
    loss = micro_batch_loss(settings, batch, log_prob, entropy).scaled
    given = torch.autograd.grad(loss, (log_prob, entropy), allow_unused=True)
    first, second = (torch.zeros(2, 2) if g is None else g for g in given)
    assert first[1, 1] == 0 and second[1, 1] == 0  # no loss token
    mask = torch.tensor(MASK, dtype=torch.bool)
    return first[mask].tolist(), second[mask].tolist()


@pytest.mark.parametrize("slug", BY_HAND)
def test_the_gradient_of_the_loss_is_the_one_reckoned_by_hand(slug: str) -> None:
    given, expected = BY_HAND[slug]
    before = GrpoSettings(**given)
    found = gradients(only_patch(slug).apply(before))[0]
    # float32 exp of a difference of logs
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert gradients(before)[0] != pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_without_a_method_it_is_the_plain_one() -> None:
    assert gradients(GrpoSettings())[0] == pytest.approx(PLAIN, rel=1e-6)


def test_entropy_control_pulls_the_mean_entropy_to_its_target() -> None:
    after = only_patch("add-entropy-control").apply(GrpoSettings())
    log_prob, entropy = gradients(after)
    assert log_prob == pytest.approx(PLAIN, rel=1e-6)
    # 0.1 (0.1 - H)^2 with H = 0.5, times three tokens of which each is a third
    assert entropy == pytest.approx([0.08] * 3, rel=1e-5)
    assert gradients(GrpoSettings())[1] == [0.0] * 3
