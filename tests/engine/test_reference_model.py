"""The oracle's model: Megatron's router, a token written out by hand, log-probabilities."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from tiny_step import FF, FIELDS, D, K, V, make_weights, unstack
from torch import Tensor

from replay_lib.engine.reference_model import log_prob_and_entropy, logits, read_model, route
from replay_lib.errors import UnsupportedModelError


def test_a_single_token_attends_to_itself_only():
    """One dense layer on one token, written out: attention returns the value itself."""
    weights = unstack(make_weights(), dense=[0])
    model = dataclasses.replace(read_model(FIELDS), layers=1, moe_layers=())
    nothing = torch.zeros(1, 1, 1, K, dtype=torch.int64)
    got = logits(model, weights, torch.tensor([[3]]), nothing, torch.zeros(1, 1, 0, dtype=bool))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt() * weights[name]

    layer = "decoder.layers.0."
    x = weights["embedding.word_embeddings.weight"][3]
    mixed = weights[layer + "self_attention.linear_qkv.weight"] @ norm(
        x, layer + "self_attention.linear_qkv.layer_norm_weight"
    )
    # a group's rows: two query heads, one key head, one value head; heads 0, 1 use value 0
    value_0, value_1 = mixed[3 * D : 4 * D], mixed[7 * D : 8 * D]
    heads = torch.cat([value_0, value_0, value_1, value_1])
    x = x + weights[layer + "self_attention.linear_proj.weight"] @ heads
    both = weights[layer + "mlp.linear_fc1.weight"] @ norm(
        x, layer + "mlp.linear_fc1.layer_norm_weight"
    )
    gate, up = both[:FF], both[FF:]
    x = x + weights[layer + "mlp.linear_fc2.weight"] @ (gate / (1 + (-gate).exp()) * up)
    expected = weights["output_layer.weight"] @ norm(x, "decoder.final_layernorm.weight")
    torch.testing.assert_close(got[0, 0], expected, rtol=1e-12, atol=1e-12)


def test_log_probabilities_and_entropy_by_definition():
    logits_BTV = torch.randn(1, 3, V, dtype=torch.float64, generator=torch.manual_seed(0))
    probability = logits_BTV.softmax(dim=2)
    log_prob, entropy = log_prob_and_entropy(logits_BTV, torch.tensor([[2, 0, -100]]))
    expected = [math.log(probability[0, 0, 2]), math.log(probability[0, 1, 0])]
    assert log_prob[0, :2].tolist() == pytest.approx(expected, rel=1e-12)
    assert log_prob[0, 2].item() == pytest.approx(math.log(probability[0, 2].max()), rel=1e-12)
    by_hand = -(probability * probability.log()).sum(dim=2)
    torch.testing.assert_close(entropy, by_hand, rtol=1e-12, atol=0.0)


def test_entropy_among_the_largest_logits():
    logits_BTV = torch.tensor([[[0.0, math.log(3.0), -50.0, -60.0]]], dtype=torch.float64)
    _, entropy = log_prob_and_entropy(logits_BTV, torch.tensor([[0]]), entropy_top_k=2)
    by_hand = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.item() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("forced", ["none", "all", "some"])
@pytest.mark.parametrize(
    ("score", "pre", "topk", "scaling"),
    [
        ("softmax", False, 2, None),
        ("softmax", True, 2, None),
        ("softmax", True, 1, 1.5),
        ("sigmoid", False, 2, 2.5),
        ("sigmoid", False, 1, None),
    ],
)
def test_router_equals_megatrons(score, pre, topk, scaling, forced):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # given while megatron is imported, none by the call
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    generator = torch.Generator().manual_seed(3)
    scores_NE = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    saved_NK = torch.stack([torch.randperm(6, generator=generator)[:topk] for _ in range(16)])
    forced_N = {"none": torch.zeros(16), "all": torch.ones(16), "some": torch.arange(16) % 2}[
        forced
    ].bool()

    class Replay:
        """What Megatron asks for saved experts; picks token by token, as a mask does."""

        @staticmethod
        def get_replay_topk(scores, topk, groups, group_topk, own):
            indices = own(scores, topk, groups, group_topk)[1]
            indices = torch.where(forced_N[:, None], saved_NK, indices)
            return scores.gather(1, indices), indices

    probs_NE, map_NE = topk_routing_with_score_function(
        scores_NE,
        topk,
        use_pre_softmax=pre,
        scaling_factor=scaling,
        score_function=score,
        router_replay=Replay(),
    )
    model = read_model(
        FIELDS
        | {
            "moe_router_topk": topk,
            "moe_router_pre_softmax": pre,
            "moe_router_score_function": score,
            "moe_router_topk_scaling_factor": scaling,
        }
    )
    chosen_NK, probs_NK = route(model, scores_NE, saved_NK, forced_N)
    mine = torch.zeros_like(scores_NE).scatter(1, chosen_NK, probs_NK)
    assert torch.equal(torch.zeros_like(map_NE).scatter(1, chosen_NK, True), map_NE)
    # Megatron takes softmax and sigmoid in float32 whatever it is given
    torch.testing.assert_close(mine, probs_NE, rtol=2e-6, atol=1e-7)


def test_a_field_that_is_not_modelled_is_named():
    with pytest.raises(UnsupportedModelError) as caught:
        read_model(FIELDS | {"multi_latent_attention": True, "moe_expert_capacity_factor": 1.5})
    assert str(caught.value) == (
        "model section: found moe_expert_capacity_factor=1.5, multi_latent_attention=True, "
        "expected fields that the oracle models"
    )
