"""The modules of the ``torch`` layer spec against the plain formulas."""

from __future__ import annotations

import itertools

import pytest
import torch

from replay_lib.engine.attention import packed_attention, rows_of
from replay_lib.engine.dispatch import LocalDispatcher
from replay_lib.engine.layers import grouped_linear

CPU = torch.device("cpu")


def naive(query, key, value, starts, scale):
    """Causal softmax attention, one row and one head after another, in float64."""
    repeat = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    for a, b in itertools.pairwise(starts):
        for head in range(query.shape[1]):
            q, k, v = query[a:b, head], key[a:b, head // repeat], value[a:b, head // repeat]
            scores = (q @ k.T * scale).masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -1e30)
            out[a:b, head] = scores.softmax(-1) @ v
    return out


@pytest.mark.parametrize(
    "starts",
    [[0, 5, 8, 20], [0, 1, 2, 3, 60], [0, 12], [0, 6, 12]],
    ids=["padded", "row-by-row", "one-row", "even-rows"],
)
def test_packed_attention_is_causal_inside_each_row(starts):
    torch.manual_seed(0)
    n = starts[-1]
    query, key, value = (
        torch.randn(n, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    out = packed_attention(query, key, value, rows_of(starts, CPU), 0.5)
    expected = naive(query, key, value, starts, 0.5)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    torch.testing.assert_close(grads, wanted)


def test_the_three_ways_to_pack_are_all_used():
    assert rows_of([0, 5, 8, 20], CPU).gather is not None
    assert rows_of([0, 6, 12], CPU).even
    by_row = rows_of([0, 1, 2, 3, 60], CPU)
    assert by_row.gather is None and not by_row.even


@pytest.mark.parametrize("dropped", [False, True], ids=["all-sent", "one-dropped"])
def test_tokens_come_back_weighted_from_their_own_experts(dropped):
    torch.manual_seed(0)
    tokens, experts, topk, hidden = 6, 4, 2, 3
    chosen = torch.rand(tokens, experts).topk(topk).indices
    routing = torch.zeros(tokens, experts).scatter(1, chosen, 1).bool()
    if dropped:
        routing[0, chosen[0, 0]] = False  # as a finite capacity does
    weights = torch.rand(tokens, experts, dtype=torch.float64) * routing
    x = torch.randn(tokens, 1, hidden, dtype=torch.float64, requires_grad=True)
    probs = weights.clone().requires_grad_()
    factor = torch.arange(1.0, experts + 1, dtype=torch.float64)

    dispatcher = LocalDispatcher(topk)
    flat, p = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing, probs))
    sent, counts, sent_probs = dispatcher.dispatch_postprocess(flat, p)
    assert int(counts.sum()) == tokens * topk
    expert = torch.repeat_interleave(torch.arange(experts), counts)
    out = sent * factor[expert, None] * sent_probs[:, None]
    back = dispatcher.token_combine(dispatcher.combine_preprocess(out))
    back = dispatcher.combine_postprocess(back)

    expected = x * (probs * factor).sum(dim=1)[:, None, None]
    torch.testing.assert_close(back, expected)
    up = torch.randn_like(back)
    grads = torch.autograd.grad((back * up).sum(), (x, probs))
    wanted = torch.autograd.grad((expected * up).sum(), (x, probs))
    torch.testing.assert_close(grads[0], wanted[0])
    # only experts that a token went to give its probabilities a gradient
    torch.testing.assert_close(grads[1] * routing, wanted[1] * routing)


@pytest.mark.parametrize(("outer", "inner"), [(8, 4), (5, 3)], ids=["grouped", "one-by-one"])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 8]])
def test_grouped_linear_is_one_product_an_expert(outer, inner, counts):
    torch.manual_seed(0)
    weight = torch.randn(4, outer, inner, requires_grad=True)
    x = torch.randn(8, inner, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    out = grouped_linear(x, weight, ends)
    parts = x.split(counts)
    expected = torch.cat([p @ w.T for p, w in zip(parts, weight, strict=True)])
    torch.testing.assert_close(out, expected)
    up = torch.randn_like(out)
    # an expanded gradient is not contiguous, which the kernel alone would refuse
    grads = torch.autograd.grad((out.sum(1, keepdim=True) * up[:, :1]).sum(), (x, weight))
    wanted = torch.autograd.grad((expected.sum(1, keepdim=True) * up[:, :1]).sum(), (x, weight))
    torch.testing.assert_close(grads, wanted)


def test_no_tokens_at_all_give_no_rows():
    out = grouped_linear(torch.zeros(0, 4), torch.zeros(2, 8, 4), torch.tensor([0, 0]))
    assert out.shape == (0, 8)
