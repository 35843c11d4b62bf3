"""What the engine refuses, told from the files alone: values, fields, settings of the run."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_lib.engine.effective import planned_differences, what_ran
from replay_lib.engine.field_values import MOST_LAYERS, RULES, wrong_values
from replay_lib.engine.meanings import TABLE
from replay_lib.engine.model_config import (
    ASSUMED,
    GPT_FIELDS,
    NEUTRAL,
    OWN_SETTINGS,
    TAKEN,
    model_config,
)
from replay_lib.engine.refusals import refusals
from replay_lib.errors import UnsupportedModelError, WeightsError
from replay_lib.snapshot import Snapshot, load_model_fields, open_snapshot
from replay_lib.snapshot.run_config import model_fields, read_model_fields

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
VPP = "microbatch_group_size_per_vp_stage"
BRIDGE = ROOT / "tests/data/snap/run_config_bridge_0.6.2.yaml"


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return open_snapshot(PLAIN)


@pytest.fixture(scope="module")
def fields(snapshot: Snapshot) -> dict[str, Any]:
    return load_model_fields(snapshot)


def test_nothing_is_refused_of_what_trainers_write(snapshot: Snapshot) -> None:
    for path in (ROOT / "spike_cases").glob("*/*/iter_*"):
        one = open_snapshot(path)
        section = load_model_fields(one)
        assert refusals(one, section).all == (), path
        assert what_ran(one.worker, one.parallel, section).assumed == (), path
    assert wrong_values(read_model_fields(BRIDGE)) == []


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("rotary_base", 0, "found 0, expected a number above 0"),
        ("rotary_base", float("nan"), "found nan, expected a number above 0"),
        ("rotary_base", 10**400, "expected a number above 0"),
        ("rotary_percent", 7, "found 7, expected a number above 0, up to 1"),
        ("rotary_percent", 0.2, "found 3 turned channels, expected an even number"),
        ("moe_router_dtype", "foo", "found 'foo', expected fp32 or fp64"),
        ("normalization", "BatchNorm", "expected LayerNorm or RMSNorm"),
        ("num_layers", "four", "found 'four', expected a whole number from 1 to 10000"),
        ("num_layers", 10**9, f"expected a whole number from 1 to {MOST_LAYERS}"),
        ("hidden_size", -64, "found -64, expected a whole number above 0"),
        ("hidden_size", 64.0, "found 64.0, expected a whole number above 0"),
        ("qk_layernorm", "yes", "found 'yes', expected true or false"),
        ("num_moe_experts", 0, "found 0, expected a whole number above 0"),
        ("num_query_groups", 3, "found 3, expected a divisor of 4 heads"),
        ("moe_router_topk", 9, "found 9, expected no more than 8 experts"),
        ("moe_router_topk", 1, "found 1, expected moe_router_pre_softmax with it"),
        ("moe_router_enable_expert_bias", True, "expected scores by sigmoid"),
        ("moe_router_num_groups", 3, "found 3 with moe_router_group_topk None"),
        ("moe_aux_loss_coeff", "a", "found 'a', expected a number, or a list of them"),
        ("moe_expert_capacity_factor", -1.0, "found -1.0, expected a number above 0"),
        ("moe_expert_capacity_factor", float("nan"), "found nan, expected a number above 0"),
        ("microbatch_group_size_per_vp_stage", 10**9, "expected a whole number from 1 to 10000"),
        ("seq_length", [1], "found [1], expected a whole number above 0"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_named(
    fields: dict[str, Any], field: str, value: Any, told: str
) -> None:
    (wrong,) = wrong_values(fields | {field: value})
    assert wrong.startswith(f"model.{field}: found ") and told in wrong
    with pytest.raises(UnsupportedModelError) as caught:
        model_config(fields | {field: value})
    assert wrong in str(caught.value)


def test_a_number_that_yaml_reads_as_text_comes_with_what_to_do() -> None:
    text = (PLAIN / "run_config.yaml").read_text()
    edited = text.replace("layernorm_epsilon: 1.0e-06", "layernorm_epsilon: 1e-06")
    fields = model_fields(edited, PLAIN / "run_config.yaml")
    assert fields["layernorm_epsilon"] == "1e-06"
    assert wrong_values(fields) == [
        "model.layernorm_epsilon: found '1e-06', expected a number above 0 (YAML reads 1e-06 as "
        "text: write it with a point, as in 1.0e-5)"
    ]


def test_everything_is_told_at_once(snapshot: Snapshot, fields: dict[str, Any]) -> None:
    worker = snapshot.worker.model_copy(update={"fp16": True, "model_role": "critic"})
    odd = dataclasses.replace(snapshot, worker=worker)
    found = refusals(odd, fields | {"enable_autocast": True, "rotary_base": 0, "topk": "x"})
    assert found.run == ("fp16=True", "model_role='critic'")
    assert found.model == (
        "model.fp16=True (only False)",
        "model.enable_autocast=True (only False)",
    )
    assert found.values == ("model.rotary_base: found 0, expected a number above 0",)


def test_what_only_the_planned_model_shows(snapshot: Snapshot, fields: dict[str, Any]) -> None:
    found = refusals(snapshot, fields | {"calculate_per_token_loss": False})
    assert [one.split(",")[0] for one in found.all] == ["model.calculate_per_token_loss=False"]
    found = refusals(snapshot, fields | {"layernorm_epsilon": None})
    assert [one.split(",")[0] for one in found.all] == ["model.layernorm_epsilon=None"]
    assert refusals(snapshot, fields | {"moe_layer_freq": [1, 0]}).all[0].endswith("zeros and ones")
    dense = {"num_moe_experts": None, "moe_router_topk": None, "moe_layer_freq": 1}
    assert refusals(snapshot, fields | dense).all == ()


def test_torchs_private_name_of_an_activation_is_the_same_one(
    snapshot: Snapshot, fields: dict[str, Any]
) -> None:
    assert refusals(snapshot, fields | {"activation_func": "torch._C._nn.gelu"}).all == ()


@pytest.mark.parametrize(
    "value",
    [float("nan"), -float("inf"), b"\xff\xfe", datetime.date(2020, 1, 1), {1}, {"a": (1, b"x")}],
)
def test_what_yaml_has_and_json_has_not_is_told_as_text(
    snapshot: Snapshot, fields: dict[str, Any], value: Any
) -> None:
    (one,) = (d for d in planned_differences(snapshot, fields | {"trick": value}) if d.matters)
    json.dumps(one.model_dump(mode="json"), allow_nan=False)
    assert one.field == "trick"


def test_a_field_of_weight_that_is_absent_is_noted(
    snapshot: Snapshot, fields: dict[str, Any]
) -> None:
    absent = {k: v for k, v in fields.items() if k not in ("layernorm_epsilon", "moe_router_topk")}
    told = {d.field: d for d in planned_differences(snapshot, absent) if d.matters}
    assert set(told) == {"layernorm_epsilon", "moe_router_topk"}
    assert told["layernorm_epsilon"].told() == (
        "model.layernorm_epsilon: run_config.yaml does not state it, replayed is 1e-05 (which "
        "changes the step; no file states it, so Megatron-Core's default is taken)"
    )
    dense = {k: v for k, v in absent.items() if not k.startswith(("moe_", "num_moe"))}
    ran = what_ran(snapshot.worker, snapshot.parallel, dense)
    assert [d.field for d in ran.assumed] == ["layernorm_epsilon"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_assumed_is_megatrons_default() -> None:
    import inspect

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from replay_lib.engine.live import plain

    defaults = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    defaults["rotary_base"] = inspect.signature(GPTModel).parameters["rotary_base"].default
    assert {name: plain(defaults[name]) for name in ASSUMED} == ASSUMED


def test_every_field_that_changes_the_step_is_taken_over_or_refused() -> None:
    """So nothing that the live model would be refused for is left out of the list."""
    settled = {"activation_func", "params_dtype", "bf16", "moe_enable_routing_replay"}
    known = {*TAKEN, *GPT_FIELDS, *NEUTRAL, *OWN_SETTINGS, *settled}
    changing = {n for entry in TABLE if entry.meaning == "changes the step" for n in entry.names}
    assert changing - known == set()
    assert set(RULES) - {*known, "seq_length", "vocab_size", VPP} == set()


def test_parameters_of_whole_numbers_are_not_cast_without_a_word(tmp_path, monkeypatch) -> None:
    from replay_lib.engine import weights
    from replay_lib.snapshot import read_content, write_snapshot

    content = read_content(open_snapshot(PLAIN))
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    whole = {name: torch.ones(128, 64, dtype=torch.int64) for name in names}
    bad = write_snapshot(
        tmp_path / "iter_0000085",
        dataclasses.replace(content, tensors=dict(content.tensors) | whole),
    )
    monkeypatch.setattr(weights, "model_slices", lambda _module: [])
    monkeypatch.setattr(weights, "_compare", lambda *_: None)  # names and shapes are right
    with pytest.raises(WeightsError) as caught:
        weights.load_weights(torch.nn.Linear(1, 1), bad.path, then="Look")
    assert str(caught.value) == (
        f"{bad.path}: parameters that are no floating point, nothing was replayed: "
        "embedding.word_embeddings.weight is int64; output_layer.weight is int64. Look."
    )
    weights.load_weights(torch.nn.Linear(1, 1), PLAIN)
