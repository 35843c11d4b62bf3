"""The parameters that a model section asks for, by name and shape, against those that are there.

Of a checkpoint the doctor asks this, of a live job the recorder. No torch and no Megatron here.
Legend: L layers, E experts, H hidden, F inner width of an expert, V rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay_lib.engine.model_config import ASSUMED, moe_pattern
from replay_lib.errors import UnsupportedModelError

Shape = tuple[int, ...]
EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "decoder.layers."
_OUTPUT = "output_layer.weight"
#: Both names of a layer's second norm; see the engine's ``weights.PRE_NORM``.
_PRE_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


@dataclass(frozen=True)
class Misshapen:
    """A parameter of shape ``saved`` where the model section gives it ``wanted``."""

    name: str
    saved: Shape
    wanted: Shape

    @property
    def told(self) -> str:
        """Without the name."""
        return f"has {list(self.saved)}, not {list(self.wanted)}"


@dataclass(frozen=True)
class Unlike:
    """Where section and weights differ, sorted by unstacked name; all empty: they fit."""

    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    misshapen: tuple[Misshapen, ...] = ()

    @property
    def count(self) -> int:
        """Parameters that differ."""
        return len(self.missing) + len(self.unknown) + len(self.misshapen)


def compare(fields: Mapping[str, Any], table: Mapping[str, Shape]) -> Unlike:
    """The model section ``fields`` against ``table``, whole shapes by checkpoint key.

    Raises UnsupportedModelError for a section with parameters that are not known here.
    """
    return compare_unstacked(fields, saved_shapes(table))


def compare_unstacked(fields: Mapping[str, Any], saved: Mapping[str, Shape]) -> Unlike:
    """As :func:`compare`, of what :func:`saved_shapes` gave."""
    wanted = expected_shapes(fields, saved.get(EMBEDDING))
    return Unlike(
        missing=tuple(sorted(wanted.keys() - saved.keys())),
        unknown=tuple(sorted(saved.keys() - wanted.keys())),
        misshapen=tuple(
            Misshapen(name, saved[name], wanted[name])
            for name in sorted(wanted.keys() & saved.keys())
            if saved[name] != wanted[name]
        ),
    )


def saved_shapes(table: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes by the unstacked name: ``decoder.layers.<i>.<name>`` for every layer of a stack."""
    shapes: dict[str, Shape] = {}
    for key, shape in table.items():
        inner = _one_norm(key.removeprefix(_HEAD))
        if not key.startswith(_HEAD):
            shapes[key] = shape
        elif inner.split(".")[0].isdigit():
            shapes[f"{_HEAD}{inner}"] = shape
        else:
            for layer in range(shape[0] if shape else 0):
                shapes[f"{_HEAD}{layer}.{inner}"] = shape[1:]
    return shapes


def _one_norm(name: str) -> str:
    return name.replace(_PRE_NORM[1], _PRE_NORM[0])


def expected_shapes(fields: Mapping[str, Any], embedding: Shape | None) -> dict[str, Shape]:
    """Shapes that the model section asks for, by unstacked name; V is that of ``embedding``.

    What the section does not state, or has null, is Megatron-Core's default. Raises
    UnsupportedModelError for a section with parameters that are not known here.
    """
    fields = ASSUMED | {name: value for name, value in fields.items() if value is not None}
    if fields.get("multi_latent_attention") or fields.get("mtp_num_layers"):
        raise UnsupportedModelError("a model section with multi-latent attention or prediction")
    try:
        layers, hidden = int(fields["num_layers"]), int(fields["hidden_size"])
        moe = (
            moe_pattern(fields.get("moe_layer_freq", 1), layers)
            if fields.get("num_moe_experts")
            else (False,) * layers
        )
        shapes: dict[str, Shape] = {}
        for layer, is_moe in enumerate(moe):
            inside = _attention(fields, hidden) | _mlp(fields, hidden, is_moe)
            shapes |= {f"{_HEAD}{layer}.{name}": shape for name, shape in inside.items()}
        shapes |= _norm("decoder.final_layernorm", hidden, fields)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModelError(f"a model section that gives no shapes ({error!r})") from error
    vocab = embedding[0] if embedding else 0
    shapes[EMBEDDING] = (vocab, hidden)
    if not fields.get("share_embeddings_and_output_weights"):
        shapes[_OUTPUT] = (vocab, hidden)
    return shapes


def _norm(name: str, width: int, fields: Mapping[str, Any]) -> dict[str, Shape]:
    glue = "_" if name.endswith("layer_norm") else "."
    shapes: dict[str, Shape] = {f"{name}{glue}weight": (width,)}
    if fields.get("normalization", "LayerNorm") == "LayerNorm":
        shapes[f"{name}{glue}bias"] = (width,)
    return shapes


def _attention(fields: Mapping[str, Any], hidden: int) -> dict[str, Shape]:
    heads = int(fields["num_attention_heads"])
    groups = int(fields.get("num_query_groups") or heads)
    channels = int(fields.get("kv_channels") or hidden // heads)
    wide = (heads + 2 * groups) * channels
    shapes: dict[str, Shape] = {
        "self_attention.linear_qkv.weight": (wide, hidden),
        "self_attention.linear_proj.weight": (hidden, heads * channels),
    }
    shapes |= _norm("self_attention.linear_qkv.layer_norm", hidden, fields)
    if fields.get("add_bias_linear") or fields.get("add_qkv_bias"):
        shapes["self_attention.linear_qkv.bias"] = (wide,)
    if fields.get("add_bias_linear"):
        shapes["self_attention.linear_proj.bias"] = (hidden,)
    if fields.get("qk_layernorm"):
        for name in ("q_layernorm", "k_layernorm"):
            shapes |= _norm(f"self_attention.{name}", channels, fields)
    return shapes


def _mlp(fields: Mapping[str, Any], hidden: int, is_moe: bool) -> dict[str, Shape]:
    twice = 2 if fields.get("gated_linear_unit") else 1
    shapes = _norm("pre_mlp_layernorm", hidden, fields)
    dense = int(fields.get("ffn_hidden_size") or 4 * hidden)
    if not is_moe:
        shapes = {name.replace(*_LAYER_NORM_OF_DENSE): s for name, s in shapes.items()}
        shapes["mlp.linear_fc1.weight"] = (twice * dense, hidden)
        shapes["mlp.linear_fc2.weight"] = (hidden, dense)
        if fields.get("add_bias_linear"):
            shapes["mlp.linear_fc1.bias"] = (twice * dense,)
            shapes["mlp.linear_fc2.bias"] = (hidden,)
        return {_one_norm(name): shape for name, shape in shapes.items()}
    experts, inner = int(fields["num_moe_experts"]), int(fields.get("moe_ffn_hidden_size") or dense)
    shapes["mlp.router.weight"] = (experts, hidden)
    if fields.get("add_bias_linear"):
        shapes["mlp.router.bias"] = (experts,)
    if fields.get("moe_router_enable_expert_bias"):
        shapes["mlp.router.expert_bias"] = (experts,)
    shapes["mlp.experts.experts.linear_fc1.weight"] = (experts, twice * inner, hidden)
    shapes["mlp.experts.experts.linear_fc2.weight"] = (experts, hidden, inner)
    shared = fields.get("moe_shared_expert_intermediate_size")
    if shared:
        shapes["mlp.shared_experts.linear_fc1.weight"] = (twice * int(shared), hidden)
        shapes["mlp.shared_experts.linear_fc2.weight"] = (hidden, int(shared))
        if fields.get("moe_shared_expert_gate"):
            shapes["mlp.shared_experts.gate_weight"] = (1, hidden)
    return shapes


_LAYER_NORM_OF_DENSE = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
