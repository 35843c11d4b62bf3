"""The rollout engine: an independent model of the same weights, rounded to bfloat16."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_zoo import TINY, tiny_weights

from replay_lib.engine.reference_model import log_prob_and_entropy, logits, read_model
from replay_lib.zoo.sampler import Sampler, rounded
from replay_lib.zoo.task import STOP, encode, make_problem

SHAPE = TINY.shape
PROMPTS = [encode(make_problem(random.Random(n)).prompt)[: 20 + 5 * n] for n in range(3)]


@pytest.fixture(scope="module")
def sampler():
    return Sampler(SHAPE, tiny_weights())


@pytest.fixture(scope="module")
def sampled(sampler):
    return sampler.sample(PROMPTS, 4, 8, torch.Generator().manual_seed(1))


def test_decoding_with_the_cache_is_reading_the_whole_row(sampler, sampled):
    rows = [PROMPTS[n // 4] + s.tokens for n, s in enumerate(sampled)]
    for (routes, log_probs), one, row in zip(sampler.read(rows), sampled, rows, strict=True):
        assert routes.dtype == torch.int16 and routes.shape == (len(row) - 1, SHAPE.layers, 2)
        assert routes.equal(one.routes)
        told = log_probs[-len(one.tokens) :]
        # sums of other lengths: the last bit of a float32 may tip a bfloat16 now and then
        assert told.tolist() == pytest.approx(one.log_probs, abs=0.02)


def test_it_is_the_oracles_model_up_to_bfloat16(sampler, sampled):
    fields = {
        "num_layers": SHAPE.layers,
        "hidden_size": SHAPE.hidden,
        "num_attention_heads": SHAPE.heads,
        "num_query_groups": SHAPE.groups,
        "kv_channels": SHAPE.channels,
        "layernorm_epsilon": SHAPE.epsilon,
        "qk_layernorm": True,
        "num_moe_experts": SHAPE.experts,
        "moe_router_topk": SHAPE.topk,
    }
    row = PROMPTS[0] + sampled[0].tokens
    ids = torch.tensor([row])
    routes = torch.cat([sampled[0].routes, sampled[0].routes[-1:]])[None].long()
    forced = torch.ones(1, len(row), SHAPE.layers, dtype=torch.bool)
    weights = {k: v.double() for k, v in tiny_weights().items()}
    found = logits(read_model(fields), weights, ids, routes, forced)
    following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
    expected, _ = log_prob_and_entropy(found, following)
    ((_, told),) = sampler.read([row])
    difference = told.double() - expected[0, :-1]
    # 8 bits of mantissa through two layers
    assert 1e-4 < difference.abs().max() < 0.2 and difference.abs().mean() < 0.05


def test_responses_end_at_the_stop_mark_or_at_the_limit(sampled):
    for one in sampled:
        assert 1 <= len(one.tokens) <= 8 and STOP not in one.tokens[:-1]
        assert len(one.tokens) == 8 or one.tokens[-1] == STOP
        assert all(p < 0 for p in one.log_probs) and len(one.log_probs) == len(one.tokens)


def test_rows_that_run_on_go_to_their_own_limit(sampler):
    generator = torch.Generator().manual_seed(1)
    rows = sampler.sample(
        PROMPTS, 4, 8, generator, unstopped=frozenset({0, 5}), unstopped_longest=20
    )
    lengths = [len(r.tokens) for r in rows]
    assert lengths[0] == lengths[5] == 20
    assert all(n <= 8 for i, n in enumerate(lengths) if i not in (0, 5))


def test_the_same_generator_draws_the_same_and_another_does_not(sampler, sampled):
    again = sampler.sample(PROMPTS, 4, 8, torch.Generator().manual_seed(1))
    other = sampler.sample(PROMPTS, 4, 8, torch.Generator().manual_seed(2))
    assert [s.tokens for s in again] == [s.tokens for s in sampled]
    assert [s.tokens for s in other] != [s.tokens for s in sampled]


def test_rounding_keeps_eight_bits():
    assert rounded(torch.tensor([1.0 + 2**-7, 1.0 + 2**-10])).tolist() == [1.0 + 2**-7, 1.0]
