"""Norms of parameters added up to layers and parts."""

from __future__ import annotations

import math

import pytest

from replay_lib.record.layer_norms import by_layer, by_part, group_of, layer_norms
from tests.record.make_results import outcome, result

NAMES = {
    "module.module.embedding.word_embeddings.weight": "embedding",
    "decoder.layers.11.self_attention.linear_qkv.weight": "layers.11.attention",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "layers.0.norms",
    "module.decoder.layers.0.self_attention.q_layernorm.weight": "layers.0.norms",
    "decoder.layers.2.pre_mlp_layernorm.weight": "layers.2.norms",
    "decoder.layers.2.mlp.router.weight": "layers.2.router",
    "decoder.layers.2.mlp.router.expert_bias": "layers.2.router",
    "decoder.layers.2.mlp.experts.local_experts.7.linear_fc1.weight": "layers.2.experts",
    "decoder.layers.2.mlp.experts.linear_fc2.weight3": "layers.2.experts",
    "decoder.layers.2.mlp.shared_experts.linear_fc1.weight": "layers.2.shared experts",
    "decoder.layers.2.mlp.linear_fc1.weight": "layers.2.mlp",
    "decoder.final_layernorm.weight": "final norm",
    "output_layer.weight": "output layer",
    "something.else": "other",
    "decoder.layers.3.something": "layers.3.other",
}


@pytest.mark.parametrize(("name", "group"), NAMES.items())
def test_each_parameter_has_a_group(name, group):
    assert group_of(name) == group


def test_norms_are_joined_by_their_squares_and_the_whole_stays():
    norms = {
        "output_layer.weight": 2.0,
        "decoder.layers.10.mlp.router.weight": 3.0,
        "decoder.layers.10.mlp.experts.linear_fc1.weight0": 4.0,
        "decoder.layers.10.mlp.experts.linear_fc1.weight1": 3.0,
        "decoder.layers.2.mlp.router.weight": 6.0,
        "embedding.word_embeddings.weight": 1.0,
    }
    groups = layer_norms(norms)
    assert groups["layers.10.experts"] == 5.0
    layers = by_layer(groups)
    assert list(layers) == ["embedding", "layer 2", "layer 10", "output layer"]
    assert layers["layer 10"] == math.hypot(3, 5)
    assert by_part(groups)["router"] == math.hypot(3, 6)
    whole = math.hypot(*norms.values())
    for told in (groups, layers, by_part(groups)):
        assert math.hypot(*told.values()) == pytest.approx(whole, rel=1e-12)


def test_what_is_not_finite_stays_so_and_what_is_large_does_not_become_so():
    assert layer_norms({"output_layer.weight": math.inf})["output layer"] == math.inf
    nan = {"output_layer.weight": math.nan, "output_layer.bias": 1.0}
    assert math.isnan(layer_norms(nan)["output layer"])
    assert layer_norms({"output_layer.weight": 1e200})["output layer"] == 1e200


def test_a_result_carries_them_with_the_thresholds_it_was_judged_by():
    norms = {"decoder.layers.0.mlp.router.weight": 3.0, "decoder.layers.0.mlp.router.bias": 4.0}
    judged = result(outcome("cap", 5.0, param_norms=norms))
    assert judged.layer_norms == {"layers.0.router": 5.0}
    assert (judged.target_ratio, judged.detector_ratio) == (1.5, 2.0)
