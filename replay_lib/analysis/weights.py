"""The checkpoint against the model section: names, shapes, and whether all of it is finite.

Legend: L layers, E experts, H hidden, F inner width of an expert, V rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_lib.analysis.findings import Finding, finding
from replay_lib.engine.model_config import moe_pattern
from replay_lib.errors import UnsupportedModelError
from replay_lib.snapshot.checkpoint import iter_tensors, stored_table
from replay_lib.snapshot.dcp_metadata import TensorEntry

Shape = tuple[int, ...]
_HEAD = "decoder.layers."
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
#: Both names of a layer's second norm; see the engine's ``weights.PRE_NORM``.
_PRE_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def embedding_rows(path: Path) -> int | None:
    """V as the checkpoint has it (the saved vocabulary may be unpadded); None where it is absent.

    Raises the errors of reading the checkpoint's table.
    """
    entry = stored_table(path).get(_EMBEDDING)
    return entry.shape[0] if entry is not None and len(entry.shape) == 2 else None


def check_names(path: Path, fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Parameters that are missing, unknown or misshapen, each kind in one finding that names all.

    Raises the errors of reading the checkpoint's table.
    """
    table = stored_table(path)
    try:
        wanted = expected_shapes(fields, table)
    except UnsupportedModelError as error:
        yield finding("weights-not-compared", ".metadata", str(error))
        return
    saved = saved_shapes(table)
    missing = sorted(wanted.keys() - saved.keys())
    unknown = sorted(saved.keys() - wanted.keys())
    odd = [
        f"{name} has {list(saved[name])}, not {list(wanted[name])}"
        for name in sorted(wanted.keys() & saved.keys())
        if saved[name] != wanted[name]
    ]
    for code, names in (
        ("weights-missing", missing),
        ("weights-unknown", unknown),
        ("weights-shape", odd),
    ):
        if names:
            yield finding(code, ".metadata", ", ".join(names))


def check_values(path: Path) -> Iterator[Finding]:
    """Parameters that are not finite, or no floating point at all, read one at a time.

    Raises the errors of reading the checkpoint.
    """
    for key, tensor in iter_tensors(path):
        if tensor.is_floating_point():
            # float8 has no isfinite of its own
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            bad = ~wide.isfinite()
            if bool(bad.any()):
                place = bad.nonzero()[0].tolist()
                found = f"{key}: {int(bad.sum())} of {tensor.numel()} values, the first at {place}"
                yield finding("weights-not-finite", ".metadata", found)
        else:
            found = f"{key} is {str(tensor.dtype).removeprefix('torch.')}, no floating point"
            yield finding("weights-shape", ".metadata", found)


def saved_shapes(table: Mapping[str, TensorEntry]) -> dict[str, Shape]:
    """Shapes by the unstacked name: ``decoder.layers.<i>.<name>`` for every layer of a stack."""
    shapes: dict[str, Shape] = {}
    for key, entry in table.items():
        inner = _one_norm(key.removeprefix(_HEAD))
        if not key.startswith(_HEAD):
            shapes[key] = entry.shape
        elif inner.split(".")[0].isdigit():
            shapes[f"{_HEAD}{inner}"] = entry.shape
        else:
            for layer in range(entry.shape[0] if entry.shape else 0):
                shapes[f"{_HEAD}{layer}.{inner}"] = entry.shape[1:]
    return shapes


def _one_norm(name: str) -> str:
    return name.replace(_PRE_NORM[1], _PRE_NORM[0])


def expected_shapes(
    fields: Mapping[str, Any], table: Mapping[str, TensorEntry]
) -> dict[str, Shape]:
    """Shapes that the model section asks for, by unstacked name; V is the checkpoint's own.

    Raises UnsupportedModelError for a section with parameters that are not known here.
    """
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
    embedding = table.get(_EMBEDDING)
    vocab = embedding.shape[0] if embedding is not None and embedding.shape else 0
    shapes[_EMBEDDING] = (vocab, hidden)
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
