"""What of a saved model section is taken over, what is refused by name, what is noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_lib.engine.model import transformer_config
from replay_lib.engine.model_config import model_config, moe_pattern
from replay_lib.errors import UnsupportedModelError
from replay_lib.snapshot import load_model_fields, open_snapshot
from replay_lib.snapshot.run_config import read_model_fields

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
BRIDGE = ROOT / "tests/data/snap/run_config_bridge_0.6.2.yaml"


@pytest.fixture(scope="module")
def fields():
    return load_model_fields(open_snapshot(PLAIN))


def test_the_saved_section_becomes_megatrons_configuration(fields):
    config = model_config(fields)
    built = transformer_config(config, replay=True)
    assert (config.dtype, config.activation, config.moe_layers) == ("float32", "silu", (True,) * 4)
    assert config.gpt["rotary_base"] == 10000
    for name in ("num_layers", "hidden_size", "moe_router_topk", "moe_router_dtype"):
        assert getattr(built, name) == fields[name], name
    assert built.moe_enable_routing_replay and not built.bf16
    assert built.num_query_groups == 2 and built.layernorm_epsilon == 1e-6


def test_a_section_of_a_newer_bridge_is_read_too():
    fields = read_model_fields(BRIDGE)
    config = model_config(fields)
    built = transformer_config(config, replay=True)
    assert config.dtype == "bfloat16" and built.bf16
    assert config.gpt["rotary_base"] == 1_000_000
    assert built.moe_router_pre_softmax is True
    assert model_config(fields, "float32").dtype == "float32"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("multi_latent_attention", True),
        ("mtp_num_layers", 1),
        ("fp8", "e4m3"),
        ("experimental_attention_variant", "gated_delta_net"),
        ("window_size", [128, 0]),
        ("hidden_dropout", 0.1),
        ("moe_input_jitter_eps", 0.01),
        ("moe_router_load_balancing_type", "global_aux_loss"),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("position_embedding_type", "yarn"),
        ("activation_func", "megatron.core.activations.squared_relu"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(fields, field, value):
    with pytest.raises(UnsupportedModelError) as caught:
        model_config(fields | {field: value})
    assert f"model.{field}={value!r}" in str(caught.value)


def test_of_an_unknown_activation_those_that_are_known_are_told(fields):
    with pytest.raises(UnsupportedModelError, match=r"'silu' \(only torch\.nn\.functional\.silu, "):
        model_config(fields | {"activation_func": "silu"})


def test_every_refusal_is_told_at_once(fields):
    with pytest.raises(UnsupportedModelError) as caught:
        model_config(fields | {"fp8": "hybrid", "mtp_num_layers": 2, "num_layers": None})
    for words in ("model.fp8='hybrid'", "model.mtp_num_layers=2", "without num_layers"):
        assert words in str(caught.value)


def test_other_dtypes_are_refused(fields):
    with pytest.raises(UnsupportedModelError, match="found 'float16', expected float32 or bfloat"):
        model_config(fields, "float16")


@pytest.mark.parametrize(
    ("freq", "pattern"),
    [(1, (True, True, True)), (2, (True, False, True)), ([0, 1, 1], (False, True, True))],
)
def test_moe_layers_by_frequency_or_list(freq, pattern):
    assert moe_pattern(freq, 3) == pattern


def test_a_list_of_another_length_is_refused():
    with pytest.raises(UnsupportedModelError, match="a list of 3 zeros and ones"):
        moe_pattern([0, 1], 3)
