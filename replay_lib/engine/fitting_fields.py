"""Which fields of a model section would explain weights that it does not describe.

The shapes themselves say most fields of the network; those that bring the comparison closer are
told. A guess for a reader, never applied to anything. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from replay_lib.engine.parameters import (
    EMBEDDING,
    Shape,
    Unlike,
    compare_unstacked,
    saved_shapes,
)
from replay_lib.errors import UnsupportedModelError

_LAYER = "decoder.layers."
_SWITCHES = (
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "share_embeddings_and_output_weights",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
)
_NORMS = ("RMSNorm", "LayerNorm")


@dataclass(frozen=True)
class Guess:
    """``changes`` to the section, and how many parameters differ with all of them (0: none)."""

    changes: dict[str, Any]
    left: int


def fitting_fields(fields: Mapping[str, Any], table: Mapping[str, Shape], found: Unlike) -> Guess:
    """The fewest changes, taken one by one, that bring ``fields`` nearest to ``table``.

    ``found`` is what :func:`~replay_lib.engine.parameters.compare` finds between the two. Each
    change leaves fewer parameters that differ than those before it.
    """
    saved = saved_shapes(table)
    changes: dict[str, Any] = {}
    left = found.count
    while left:
        tried = [
            (_count({**fields, **changes, name: value}, saved), name, value)
            for name, value in _candidates({**fields, **changes}, saved)
            if name not in changes
        ]
        best = min(tried, key=lambda one: one[0], default=None)
        if best is None or not best[0] < left:
            break
        left = best[0]
        changes[best[1]] = best[2]
    return Guess(changes, left)


def _count(fields: Mapping[str, Any], saved: Mapping[str, Shape]) -> int:
    try:
        return compare_unstacked(fields, saved).count
    except UnsupportedModelError:
        return len(saved) + 1  # no candidate


def _candidates(fields: Mapping[str, Any], saved: Mapping[str, Shape]) -> Iterator[tuple[str, Any]]:
    """Other values for single fields: switches turned, and sizes as the shapes have them."""
    for name in _SWITCHES:
        yield name, True
        yield name, False
    for norm in _NORMS:
        yield "normalization", norm
    for name, value in _sizes(fields, saved).items():
        if fields.get(name) != value:
            yield name, value


def _sizes(fields: Mapping[str, Any], saved: Mapping[str, Shape]) -> dict[str, Any]:
    """Sizes of the network that its weights state, by field."""
    numbers = sorted({int(name.split(".")[2]) for name in saved if name.startswith(_LAYER)})
    routed = [f"{_LAYER}{n}.mlp.router.weight" in saved for n in numbers]
    sizes: dict[str, Any] = {
        "num_layers": len(numbers) or None,
        "hidden_size": _last(saved.get(EMBEDDING)),
        "ffn_hidden_size": _last(_any(saved, ".mlp.linear_fc2.weight")),
        "moe_ffn_hidden_size": _last(_any(saved, ".mlp.experts.experts.linear_fc2.weight")),
        "moe_layer_freq": [int(one) for one in routed] if any(routed) else None,
        **_heads(fields, saved),
    }
    known = {name: value for name, value in sizes.items() if value}
    router = _any(saved, ".mlp.router.weight")
    shared = _any(saved, ".mlp.shared_experts.linear_fc2.weight")
    # these two are told where they are not there, too
    return known | {
        "num_moe_experts": router[0] if router else None,
        "moe_shared_expert_intermediate_size": _last(shared),
    }


def _heads(fields: Mapping[str, Any], saved: Mapping[str, Shape]) -> dict[str, Any]:
    """Heads and their width, of which the fused matrices state only products."""
    proj = _last(_any(saved, ".self_attention.linear_proj.weight"))
    qkv = _any(saved, ".self_attention.linear_qkv.weight")
    norm = _last(_any(saved, ".self_attention.q_layernorm.weight"))
    heads = fields.get("num_attention_heads")
    if not proj or not qkv or not isinstance(heads, int) or heads < 1:
        return {}
    channels = norm or proj // heads
    if not channels or proj % channels or qkv[0] % channels:
        return {}
    groups, odd = divmod(qkv[0] // channels - proj // channels, 2)
    known = {"num_attention_heads": proj // channels, "kv_channels": channels}
    return known if odd or groups < 1 else known | {"num_query_groups": groups}


def _any(saved: Mapping[str, Shape], ending: str) -> Shape | None:
    """The shape of the first layer that has such a parameter."""
    return next((shape for name, shape in saved.items() if name.endswith(ending)), None)


def _last(shape: Shape | None) -> int | None:
    return shape[-1] if shape else None
