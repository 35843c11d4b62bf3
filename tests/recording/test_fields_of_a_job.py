"""Fields that do not describe the weights are an error at the first step, not after the spike."""

from __future__ import annotations

import dataclasses

import pytest
from small_job import FIELDS, HOW, NAMES, Small, batch_of, new_recorder
from steps import SETTINGS

from replay_lib.analysis.doctor import examine
from replay_lib.errors import UsageError
from replay_lib.recorder import Event, SpikeRecorder, torch_job
from replay_lib.recording.describing import Checked, Description, check_description

LOOK = "`spike-replay doctor SNAPSHOT` compares the same in a snapshot."


def without(*names, **changes):
    return {k: v for k, v in FIELDS.items() if k not in names} | changes


def first_step(home, fields):
    return new_recorder(home, fields=fields).observe(0, 1.0, batch_of())


def warned(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "replay_lib.recorder"]


def test_fields_that_fit_are_taken_without_a_word(tmp_path, caplog):
    assert first_step(tmp_path, FIELDS).event is Event.ORDINARY
    assert warned(caplog) == []


def test_the_whole_error_names_parameters_field_and_doctor(tmp_path):
    with pytest.raises(UsageError) as caught:
        first_step(tmp_path, without("gated_linear_unit"))
    assert str(caught.value) == (
        "recorder: fields: found decoder.layers.{0-1}.mlp.linear_fc1.weight has [48, 16], not "
        "[24, 16], expected the names and shapes of these fields. gated_linear_unit=True instead "
        f"of nothing would explain it. {LOOK}"
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            without("add_bias_linear"),
            [
                "missing in the weights: decoder.layers.{0-1}.mlp.linear_fc1.bias, ",
                "decoder.layers.{0-1}.self_attention.linear_qkv.bias",
                "add_bias_linear=False instead of nothing would explain it",
            ],
        ),
        (
            without("normalization"),
            ["missing in the weights: decoder.final_layernorm.bias", "normalization='RMSNorm'"],
        ),
        (without(ffn_hidden_size=48), ["fc2.weight has [16, 24], not", "ffn_hidden_size=24 inst"]),
        (without("num_query_groups"), ["has [32, 16], not [48, 16]", "num_query_groups=2 instead"]),
        (without(num_query_groups=1), ["not [24, 16]", "num_query_groups=2 instead of 1"]),
        (without(kv_channels=8), ["proj.weight has [16, 16], not [16, 32]", "kv_channels=4 inst"]),
        (
            without("share_embeddings_and_output_weights"),
            ["missing in the weights: output_layer.weight", "share_embeddings_and_output_weights="],
        ),
        (
            without(num_layers=1),
            [
                "extra in the weights: decoder.layers.1.mlp.linear_fc1.weight, ",
                "num_layers=2 instead of 1 would explain it",
            ],
        ),
        (without(hidden_size=32), ["has [40, 16], not [40, 32]", "hidden_size=16 instead of 32"]),
        (
            without("gated_linear_unit", "normalization", ffn_hidden_size=4),
            [
                "gated_linear_unit=True",
                "normalization='RMSNorm'",
                "ffn_hidden_size=24 instead of 4",
            ],
        ),
        (without("hidden_size"), ["found no hidden_size, expected all that have no default"]),
        (without(rotary_base="1e4"), ["model.rotary_base: found '1e4', expected a number above 0"]),
    ],
)
def test_each_mistake_is_raised_at_the_first_step_with_the_field_that_explains_it(
    tmp_path, fields, told
):
    with pytest.raises(UsageError) as caught:
        first_step(tmp_path, fields)
    assert [part for part in told if part not in str(caught.value)] == []


#: A network of experts as its checkpoint has it: L=2, H=16, E=4, F=8, V=24.
INSIDE = {
    "self_attention.linear_qkv.layer_norm_weight": (2, 16),
    "self_attention.linear_qkv.weight": (2, 32, 16),
    "self_attention.linear_proj.weight": (2, 16, 16),
    "self_attention.q_layernorm.weight": (2, 4),
    "self_attention.k_layernorm.weight": (2, 4),
    "pre_mlp_layernorm.weight": (2, 16),
    "mlp.router.weight": (2, 4, 16),
    "mlp.experts.experts.linear_fc1.weight": (2, 4, 16, 16),
    "mlp.experts.experts.linear_fc2.weight": (2, 4, 16, 8),
}
MOE = {
    "embedding.word_embeddings.weight": (24, 16),
    "output_layer.weight": (24, 16),
    "decoder.final_layernorm.weight": (16,),
    **{f"decoder.layers.{name}": shape for name, shape in INSIDE.items()},
}
MOE_FIELDS = FIELDS | {
    "share_embeddings_and_output_weights": False,
    "qk_layernorm": True,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
}


def described(fields, shapes, stated=True):
    job = torch_job(Small(), names=NAMES, fields=fields, settings=SETTINGS, step=HOW)
    said = Description(job.worker_config, job.parallel, job.run_config, stated)
    return check_description(said, shapes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"num_moe_experts": None}, "num_moe_experts=4 instead of nothing"),
        ({"num_moe_experts": 8}, "num_moe_experts=4 instead of 8 would explain it"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq=[1, 1] instead of [0, 1] would explain it"),
        ({"moe_ffn_hidden_size": 16}, "moe_ffn_hidden_size=8 instead of 16 would explain it"),
        ({"qk_layernorm": False}, "qk_layernorm=True instead of False would explain it"),
        (
            {"moe_shared_expert_intermediate_size": 8},
            "moe_shared_expert_intermediate_size=None instead of 8 would explain it",
        ),
        ({"add_bias_linear": True}, "mlp.router.bias"),
    ],
)
def test_of_a_network_of_experts_too(change, told):
    found = described(MOE_FIELDS | change, MOE)
    assert told in found.wrong and bool(told) == bool(found.wrong) and found.remark == ""


def test_a_misspelt_place_is_no_field_and_both_its_names_are_told(tmp_path):
    names = NAMES | {"final": "decoder.final_norm.weight"}
    job = torch_job(Small(), names=names, fields=FIELDS, settings=SETTINGS, step=HOW)
    with pytest.raises(UsageError) as caught:
        SpikeRecorder(tmp_path, job=job).observe(0, 1.0, batch_of())
    assert (
        "found missing in the weights: decoder.final_layernorm.weight; "
        "extra in the weights: decoder.final_norm.weight"
    ) in str(caught.value)
    assert f"No single field explains it: look at names and fields. {LOOK}" in str(caught.value)


def test_what_the_engine_refuses_is_one_warning_and_is_recorded(tmp_path, caplog):
    recorder = new_recorder(tmp_path, fields=without(hidden_dropout=0.1))
    recorder.observe(10, 1.0, batch_of())
    seen = recorder.observe(11, 9.0, batch_of())
    (told,) = warned(caplog)
    assert told.startswith("recorder: the replay's engine does not model model.hidden_dropout=0.1")
    assert seen.path is not None
    assert {"model-unsupported"} <= examine(seen.path).codes


def test_a_refused_field_may_be_why_weights_differ_but_not_where_another_explains_them():
    gate = MOE | {"decoder.layers.self_attention.gate.weight": (2, 16, 16)}
    refused = described(MOE_FIELDS | {"attention_output_gate": True}, gate)
    assert refused.wrong == "" and "model.attention_output_gate=True" in refused.remark
    extra = "extra in the weights: decoder.layers.{0-1}.self_attention.gate.weight, expected"
    assert extra in refused.remark and extra in described(MOE_FIELDS, gate).wrong
    ungated = MOE_FIELDS | {"gated_linear_unit": False, "attention_output_gate": True}
    assert (
        "gated_linear_unit=True instead of False would explain it" in described(ungated, MOE).wrong
    )


def test_what_was_read_off_the_live_model_never_ends_the_training():
    fields = MOE_FIELDS | {"gated_linear_unit": False}
    stated, live = described(fields, MOE), described(fields, MOE, stated=False)
    assert "gated_linear_unit=True instead of False would explain it" in stated.wrong
    assert live == Checked(remark=stated.wrong)
    assert described(without("num_layers"), MOE, stated=False) == Checked(
        remark="recorder: fields: found no num_layers, expected all that have no default"
    )


@pytest.mark.parametrize("name", ["gated_linear_unit", "normalization", "num_query_groups"])
def test_the_doctor_finds_the_same_in_a_snapshot(tmp_path, name):
    recorder = new_recorder(tmp_path, fields=without(name))
    recorder.job = dataclasses.replace(recorder.job, stated=False)
    recorder.observe(10, 1.0, batch_of())
    path = recorder.observe(11, 9.0, batch_of()).path
    assert {"weights-missing", "weights-shape"} & examine(path).codes
