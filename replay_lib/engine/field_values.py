"""Values that a field of the saved model section can have; what cannot be is told by name.

Megatron-Core checks little of this and late: a text where a number belongs, or a rotary base of
zero, would end in an error of torch, or in angles that are not finite. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replay_lib.errors import number_hint

#: More layers than any network has; what loops over layers stays short.
MOST_LAYERS = 10_000

_COUNTS = (
    "num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups kv_channels "
    "num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
    "moe_router_num_groups moe_router_group_topk seq_length vocab_size"
)
_POSITIVE = (
    "layernorm_epsilon rotary_base rope_scaling_factor seq_len_interpolation_factor softmax_scale "
    "moe_expert_capacity_factor"
)
_NUMBERS = "moe_router_topk_scaling_factor moe_z_loss_coeff"
_SWITCHES = (
    "layernorm_zero_centered_gamma qk_layernorm gated_linear_unit add_bias_linear add_qkv_bias "
    "rotary_interleaved fp32_residual_connection apply_residual_connection_post_layernorm "
    "moe_shared_expert_gate moe_router_pre_softmax moe_router_enable_expert_bias "
    "moe_apply_probs_on_input moe_token_dropping rope_scaling share_embeddings_and_output_weights "
    "bf16"
)
#: Megatron-Core's own choices (TransformerConfig); the newest version's, where they differ.
_CHOICES: dict[str, tuple[str, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_router_dtype": ("fp32", "fp64"),
    "moe_token_drop_policy": ("probs", "position"),
}


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float range
        return False


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40


def _is_coefficient(value: Any) -> bool:
    return all(map(_is_number, value)) if isinstance(value, list) else _is_number(value)


Rule = tuple[Callable[[Any], bool], str]


def _rules() -> dict[str, Rule]:
    count: Rule = (_is_count, "a whole number above 0")
    positive: Rule = (lambda v: _is_number(v) and v > 0, "a number above 0")
    number: Rule = (_is_number, "a number")
    switch: Rule = (lambda v: isinstance(v, bool), "true or false")
    rules = dict.fromkeys(_COUNTS.split(), count) | dict.fromkeys(_POSITIVE.split(), positive)
    rules |= dict.fromkeys(_NUMBERS.split(), number) | dict.fromkeys(_SWITCHES.split(), switch)
    for name, choices in _CHOICES.items():
        rules[name] = (_one_of(choices), " or ".join(choices))
    rules["num_layers"] = (
        lambda v: _is_count(v) and v <= MOST_LAYERS,
        f"a whole number from 1 to {MOST_LAYERS}",
    )
    rules["microbatch_group_size_per_vp_stage"] = (
        lambda v: _is_count(v) and v <= MOST_LAYERS,
        f"a whole number from 1 to {MOST_LAYERS}",
    )
    rules["rotary_percent"] = (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, up to 1")
    rules["moe_aux_loss_coeff"] = (_is_coefficient, "a number, or a list of them")
    return rules


def _one_of(choices: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in choices


RULES = _rules()


def wrong_values(fields: Mapping[str, Any]) -> list[str]:
    """Every field that has a value it cannot have, one text each: found, expected, what to do.

    A field that is null takes its default, as one that is absent does. Where single values are
    right, what contradicts between two of them is told.
    """
    wrong = [
        _told(name, fields[name], expected)
        for name, (fits, expected) in RULES.items()
        if fields.get(name) is not None and not fits(fields[name])
    ]
    return wrong or list(_contradictions(fields))


def possible_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` without those that have a value they cannot have."""
    return {
        name: value
        for name, value in fields.items()
        if value is None or name not in RULES or RULES[name][0](value)
    }


def _told(name: str, value: Any, expected: str) -> str:
    hint = number_hint(value)
    text = f"model.{name}: found {value!r:.60}, expected {expected}"
    return f"{text} ({hint})" if hint else text


def _contradictions(fields: Mapping[str, Any]) -> Iterator[str]:
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    groups, channels = fields.get("num_query_groups"), fields.get("kv_channels")
    if heads and groups and heads % groups:
        yield f"model.num_query_groups: found {groups}, expected a divisor of {heads} heads"
    if heads and width and not channels and width % heads:
        yield f"model.hidden_size: found {width}, expected a multiple of {heads} heads"
    if heads and width and fields.get("position_embedding_type", "rope") == "rope":
        share = fields.get("rotary_percent")
        turned = int((channels or width // heads) * (1.0 if share is None else share))
        if turned < 2 or turned % 2:
            yield f"model.rotary_percent: found {turned} turned channels, expected an even number"
    if fields.get("num_moe_experts"):
        yield from _router_contradictions(fields, int(fields["num_moe_experts"]))


def _router_contradictions(fields: Mapping[str, Any], experts: int) -> Iterator[str]:
    """Megatron-Core refuses the same (TransformerConfig), once a model is built."""
    topk = fields.get("moe_router_topk") or 2
    scores = fields.get("moe_router_score_function") or "softmax"
    if topk > experts:
        yield f"model.moe_router_topk: found {topk}, expected no more than {experts} experts"
    if fields.get("moe_router_enable_expert_bias") and scores == "softmax":
        yield "model.moe_router_enable_expert_bias: found true, expected scores by sigmoid"
    if topk == 1 and scores == "softmax" and not fields.get("moe_router_pre_softmax"):
        yield "model.moe_router_topk: found 1, expected moe_router_pre_softmax with it"
    groups, chosen = fields.get("moe_router_num_groups"), fields.get("moe_router_group_topk")
    if groups and (experts % groups or not chosen or chosen > groups):
        found = f"{groups} with moe_router_group_topk {chosen}"
        yield f"model.moe_router_num_groups: found {found}, expected a divisor of {experts}"
