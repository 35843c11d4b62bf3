"""Log-probabilities and entropies from logits."""

from __future__ import annotations

import math

import pytest
import torch

from replay_lib.loss import GrpoSettings, log_prob_and_entropy
from replay_lib.loss.logits import entropy_of, top_k_logits

CONTROL = GrpoSettings(entropy_control={"compute_entropy": True})


def logits_and_labels(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=g, dtype=torch.float64) * 4
    return logits.to(dtype), torch.tensor([0, 10, 3, -100, 7])


def masked_cross_entropy(logits, labels):
    """Megatron's formulas for one rank, written out: value and gradient factor of each token."""
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    inside = (labels >= 0) & (labels < logits.shape[-1])
    picked = shifted[torch.arange(len(labels)), labels.clamp(min=0)] * inside
    value = shifted.exp().sum(dim=-1).log() - picked
    onehot = torch.zeros_like(logits)
    onehot[torch.arange(len(labels)), labels.clamp(min=0)] = inside.to(logits.dtype)
    return value, logits.softmax(dim=-1) - onehot


def test_values_and_gradients_are_those_of_the_masked_cross_entropy():
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    log_prob, entropy = log_prob_and_entropy(logits, labels, GrpoSettings())
    log_prob.sum().backward()
    value, gradient = masked_cross_entropy(logits.detach(), labels)
    assert torch.allclose(log_prob, -value, rtol=1e-13, atol=1e-13)  # float64 rounding
    assert torch.allclose(logits.grad, -gradient, rtol=1e-13, atol=1e-13)
    assert not entropy.any()


def test_a_label_outside_the_vocabulary_gets_the_likeliest_tokens_value():
    logits, labels = logits_and_labels()
    log_prob, _ = log_prob_and_entropy(logits, labels, GrpoSettings())
    expected = -(torch.logsumexp(logits[3], dim=-1) - logits[3].max())
    assert float(log_prob[3]) == pytest.approx(float(expected), rel=1e-12)
    past_the_end, _ = log_prob_and_entropy(logits[3:4], torch.tensor([11]), GrpoSettings())
    assert float(past_the_end) == float(log_prob[3])


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_precision_is_float32_or_that_of_float64_logits(dtype, result):
    logits, labels = logits_and_labels(dtype)
    log_prob, entropy = log_prob_and_entropy(logits, labels, CONTROL)
    assert (log_prob.dtype, entropy.dtype) == (result, result)
    exact, _ = log_prob_and_entropy(logits.double(), labels, CONTROL)
    # the logits' own rounding is in both
    assert torch.allclose(log_prob.double(), exact, rtol=0, atol=1e-5)


def test_entropy_is_computed_only_where_it_is_wanted():
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    _, off = log_prob_and_entropy(logits, labels, GrpoSettings())
    assert not off.requires_grad
    _, forced = log_prob_and_entropy(logits, labels, GrpoSettings(), want_entropy=True)
    p = logits.softmax(dim=-1)
    expected = torch.logsumexp(logits, dim=-1) - (p * logits).sum(dim=-1)
    assert torch.allclose(forced, expected, rtol=1e-12, atol=1e-12)
    for settings in (CONTROL, GrpoSettings(entropy_control={"alpha": 0.1})):
        assert torch.equal(log_prob_and_entropy(logits, labels, settings)[1], forced)
    _, refused = log_prob_and_entropy(logits, labels, CONTROL, want_entropy=False)
    assert not refused.any()


def test_entropy_gradient():
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_prob_and_entropy(x, labels, CONTROL)[1], logits)


def test_top_k_leaves_the_largest_logits_to_the_entropy_alone():
    logits, labels = logits_and_labels()
    settings = GrpoSettings(entropy_control={"compute_entropy": True, "top_k": 1})
    log_prob, entropy = log_prob_and_entropy(logits, labels, settings)
    assert entropy.tolist() == pytest.approx([0.0] * 5, abs=1e-12)
    assert torch.equal(log_prob, log_prob_and_entropy(logits, labels, CONTROL)[0])

    two = torch.tensor([[5.0, 5.0, -1.0, 1.0]], requires_grad=True)
    pair = GrpoSettings(entropy_control={"compute_entropy": True, "top_k": 2})
    _, entropy = log_prob_and_entropy(two, torch.tensor([0]), pair)
    entropy.sum().backward()
    assert entropy.tolist() == pytest.approx([math.log(2)], rel=1e-6)
    assert bool(torch.isfinite(two.grad).all())
    assert two.grad[0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("top_k", [0, -1, -5])
def test_a_top_k_of_none_takes_all_logits(top_k):
    logits, labels = torch.randn(3, 7), torch.tensor([0, 3, 6])
    settings = GrpoSettings(entropy_control={"compute_entropy": True, "top_k": top_k})
    _, entropy = log_prob_and_entropy(logits, labels, settings)
    assert torch.equal(entropy, entropy_of(torch.log_softmax(logits, dim=-1)))


def test_a_top_k_of_the_vocabulary_or_more_changes_nothing():
    logits, _ = logits_and_labels()
    assert torch.equal(top_k_logits(logits, 11), logits)
    assert torch.equal(top_k_logits(logits, 99), logits)


@pytest.mark.parametrize("label", [-1, -100, 11, 12, 1000])
def test_any_label_outside_the_vocabulary_is_treated_alike(label):
    logits, _ = logits_and_labels()
    found, _ = log_prob_and_entropy(logits[:1], torch.tensor([label]), GrpoSettings())
    likeliest = logits[:1].argmax(dim=-1)
    expected, _ = log_prob_and_entropy(logits[:1], likeliest, GrpoSettings())
    assert float(found) == float(expected)


def test_a_strong_entropy_gradient_is_finite_where_logits_are_masked_away():
    logits = torch.tensor([[5.0, 4.0, -1.0, 1.0]], requires_grad=True)
    pair = GrpoSettings(entropy_control={"compute_entropy": True, "top_k": 2})
    _, entropy = log_prob_and_entropy(logits, torch.tensor([0]), pair)
    (100.0 * entropy.sum()).backward()
    assert bool(torch.isfinite(logits.grad).all())


def test_entropies_and_largest_logits_are_of_the_last_dimension_whatever_the_others():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 7, generator=g, dtype=torch.float64)
    log_p = torch.log_softmax(logits, dim=-1)
    assert torch.equal(entropy_of(log_p), entropy_of(log_p.view(6, 7)).view(2, 3))
    kept = top_k_logits(logits, 4)
    assert torch.equal(kept, top_k_logits(logits.view(6, 7), 4).view(2, 3, 7))
    assert ((kept == logits).sum(dim=-1) == 4).all()
