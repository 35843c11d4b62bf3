"""Megatron-Bridge's run_config.yaml, old and new, as plain values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from replay_lib.errors import SnapshotError
from replay_lib.snapshot import load_model_fields, open_snapshot

NEW = Path(__file__).parents[1] / "data" / "snap" / "run_config_bridge_0.6.2.yaml"


def fields_of(directory: Path, text: str | None = None) -> dict[str, Any]:
    if text is not None:
        (directory / "run_config.yaml").write_text(text)
    return load_model_fields(open_snapshot(directory))


def test_the_older_document(plain: Path) -> None:
    fields = fields_of(plain)
    assert fields["_target_"] == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert (fields["num_layers"], fields["hidden_size"], fields["moe_router_topk"]) == (4, 64, 2)
    assert (fields["params_dtype"], fields["autocast_dtype"]) == ("float32", "float32")
    assert fields["attention_backend"] == "flash"
    assert fields["activation_func"] == "torch.nn.functional.silu"
    assert fields["init_method"] == {
        "function": "torch.nn.init.normal_",
        "args": [],
        "kwargs": {"mean": 0.0, "std": 0.06},
    }
    assert fields["recompute_modules"] == ["core_attn"]
    assert fields["pipeline_dtype"] is None


def test_the_newer_document(broken_plain: Path) -> None:
    old = fields_of(broken_plain)
    fields = fields_of(broken_plain, NEW.read_text())
    assert (fields["params_dtype"], fields["rotary_base"]) == ("bfloat16", 1e6)
    assert (fields["moe_grouped_gemm"], fields["moe_router_pre_softmax"]) == (True, True)
    assert fields["inference_cuda_graph_scope"] == "none"
    spec = "megatron.bridge.models.gpt_provider.default_layer_spec"
    assert fields["transformer_layer_spec"] == spec
    assert len(set(fields) - set(old)) == 66


def test_every_value_is_plain(broken_plain: Path) -> None:
    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
        if isinstance(value, list):
            return all(map(is_plain, value))
        return value is None or isinstance(value, str | int | float | bool)

    assert all(map(is_plain, fields_of(broken_plain, NEW.read_text()).values()))


@pytest.mark.parametrize(
    ("value", "plain_value"),
    [
        ({"_target_": "torch.dtype", "_args_": ["torch.bfloat16"], "_call_": True}, "bfloat16"),
        ({"_target_": "a.AttnBackend", "_args_": [5], "_call_": True}, "auto"),
        ({"_target_": "a.Other", "_args_": [5], "_call_": True}, "Other(5)"),
        ({"_target_": "a.Nested", "x": 1}, {"_target_": "a.Nested", "x": 1}),
        ({"_target_": "torch.int64", "_call_": False}, "int64"),
        ({"_target_": "torch.relu", "_call_": False}, "torch.relu"),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    ],
)
def test_ways_to_write_a_value(broken_plain: Path, value: Any, plain_value: Any) -> None:
    text = yaml.safe_dump({"model": {"field": value}})
    assert fields_of(broken_plain, text)["field"] == plain_value


def test_a_target_is_never_called(broken_plain: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    call = {"_target_": "os.system", "_args_": [f"touch {marker}"], "_call_": True}
    fields = fields_of(broken_plain, yaml.safe_dump({"model": {"field": call}}))
    assert fields["field"] == f"system('touch {marker}')"
    assert not marker.exists()


def test_a_yaml_tag_is_never_obeyed(broken_plain: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f'model: {{field: !!python/object/apply:os.system ["touch {marker}"]}}'
    with pytest.raises(SnapshotError, match=r"run_config\.yaml: found a document that is not"):
        fields_of(broken_plain, text)
    assert not marker.exists()
    yaml.unsafe_load(text)  # the control: the text would have run
    assert os.path.exists(marker)  # noqa: PTH110


@pytest.mark.parametrize(
    "text",
    ["model: [", "- a list", "model: 3", "\x00", "model: &a {b: *a}", "other: {}", "{" * 400],
)
def test_a_document_without_a_model_is_refused(broken_plain: Path, text: str) -> None:
    with pytest.raises(SnapshotError, match=r"run_config\.yaml"):
        fields_of(broken_plain, text)


def test_shared_anchors_cost_nothing(broken_plain: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x]"]
    lines += [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 30)]
    text = "\n".join([*lines, "model: {field: *a29, num_layers: 4}"])
    assert fields_of(broken_plain, text)["num_layers"] == 4
