"""From the saved model section to a Megatron-Core configuration, or a refusal by field name.

The saved section (``run_config.yaml``) holds every field of Megatron-Bridge's provider, and its
keys differ between versions. Four kinds are told apart: fields that shape the network and are
taken over; fields that the replay sets itself (layout, fusions, recompute: they change speed, not
the step); fields that must have their neutral value, else the replay is refused; and all others,
which :mod:`replay_lib.engine.effective` compares with what the model really runs with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay_lib.engine.field_values import wrong_values
from replay_lib.errors import UnsupportedModelError, fault
from replay_lib.layout import RUN_CONFIG

#: Fields of Megatron's TransformerConfig that shape the step and are taken over as saved.
TAKEN = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "softmax_scale",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "normalization",
    "qk_layernorm",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "attention_softmax_in_fp32",
    "rotary_interleaved",
    "fp32_residual_connection",
    "apply_residual_connection_post_layernorm",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_dtype",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_apply_probs_on_input",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_token_dropping",
]

#: Arguments of GPTModel (not of its configuration), with the value used where they are absent.
GPT_FIELDS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "seq_len_interpolation_factor": None,
    "share_embeddings_and_output_weights": False,
}

#: Fields that this engine does not model: any other value than these is refused by name.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "fp8": (None, False),
    "fp4": (None, False),
    "fp16": (False, None),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "is_hybrid_model": (False, None),
    "hybrid_override_pattern": (None,),
    "heterogeneous_block_specs": (False, None),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "qk_l2_norm": (False, None),
    "no_rope_freq": (None,),
    "attention_output_gate": (False, None),
    "moe_latent_size": (None,),
    "moe_input_jitter_eps": (None, 0, 0.0),
    "moe_router_force_load_balancing": (False, None),
    "moe_router_force_biased": (None,),
    "moe_n_hash_layers": (None, 0),
    "moe_pad_expert_input_to_capacity": (False, None),
    "hidden_dropout": (0, 0.0, None),
    "attention_dropout": (0, 0.0, None),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0, 0.0, None),
    "mrope_section": (None,),
    "vision_config": (None,),
    "yarn_rotary_scaling_factor": (None,),
    "init_model_with_meta_device": (False, None),
    "use_mup": (False, None),
    "mup_embedding_mult": (1.0, None),
    "mup_output_mult": (1.0, None),
    "mup_width_mult": (1.0, None),
    "mup_attn_scale_power": (1.0, None),
    "enable_autocast": (False, None),
    "first_last_layers_bf16": (False, None),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    "window_attn_skip_freq": (None,),
    "moe_router_topk_limited_devices": (None,),
    "rotary_scaling_factor": (None,),
}

#: What Megatron-Core (its TransformerConfig and GPTModel) takes for a field of weight that a
#: section does not state. A provider states them all; a section without them is not of one.
ASSUMED: dict[str, Any] = {
    "activation_func": "torch.nn.functional.gelu",
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "layernorm_epsilon": 1e-5,
    "normalization": "LayerNorm",
    "rotary_base": 10000,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_topk": 2,
}

#: What the replay decides for itself: one step on few ranks, nothing fused, nothing recomputed.
#: None of it changes what the step computes, beyond the order of floating-point sums.
OWN_SETTINGS: dict[str, Any] = {
    "perform_initialization": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "alltoall",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,
    "variable_seq_lengths": True,
}

#: Balancing by running state over steps cannot be folded or restored from a snapshot.
FOLDABLE_BALANCING = ("none", "aux_loss", "seq_aux_loss")
ACTIVATIONS = {
    "torch.nn.functional.silu": "silu",
    "torch.nn.functional.gelu": "gelu",
    "torch.nn.functional.relu": "relu",
}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the engine builds: plain values, no torch. ``dtype`` is the parameters' dtype."""

    transformer: dict[str, Any]
    gpt: dict[str, Any]
    activation: str
    dtype: str
    max_sequence_length: int

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each transformer layer, whether it is a MoE layer."""
        layers = int(self.transformer["num_layers"])
        if not self.transformer.get("num_moe_experts"):
            return (False,) * layers
        return moe_pattern(self.transformer.get("moe_layer_freq", 1), layers)


def moe_pattern(freq: Any, layers: int) -> tuple[bool, ...]:
    """Which layers are MoE by Megatron's ``moe_layer_freq``: every n-th, or as a list says."""
    if isinstance(freq, int) and freq > 0:
        return tuple(i % freq == 0 for i in range(layers))
    if isinstance(freq, list | tuple) and len(freq) == layers:
        return tuple(bool(x) for x in freq)
    raise UnsupportedModelError(
        fault(
            RUN_CONFIG,
            "model.moe_layer_freq",
            repr(freq),
            f"an integer or a list of {layers} zeros and ones",
        )
    )


def model_config(fields: Mapping[str, Any], precision: str = "recorded") -> ModelConfig:
    """Read the saved model section ``fields`` (plain values as ``load_model_fields`` gives them).

    ``precision``: ``recorded``, or ``float32`` or ``bfloat16`` to run in another dtype. Raises
    UnsupportedModelError that names every field in the way at once.
    """
    refused, wrong = refused_fields(fields), wrong_values(fields)
    told = []
    if refused:
        told.append(
            "this engine does not model "
            + "; ".join(refused)
            + ". Replay it with a backend that does, or export a snapshot without them."
        )
    if wrong:
        told.append("; ".join(wrong) + ". Correct the model section, or copy it again.")
    if told:
        raise UnsupportedModelError(f"{RUN_CONFIG}: {' '.join(told)}")
    taken = {k: fields[k] for k in TAKEN if fields.get(k) is not None}
    gpt = {k: v if (v := fields.get(k)) is not None else d for k, d in GPT_FIELDS.items()}
    return ModelConfig(
        transformer=taken,
        gpt=gpt,
        activation=ACTIVATIONS[activation_name(fields)],
        dtype=_dtype(fields, precision),
        max_sequence_length=int(fields.get("seq_length") or 0),
    )


def refused_fields(fields: Mapping[str, Any]) -> list[str]:
    """Every field of the saved model section that this engine does not model, with its value."""
    found = [
        f"model.{name}={fields[name]!r} (only {allowed[0]!r})"
        for name, allowed in NEUTRAL.items()
        if name in fields and fields[name] not in allowed
    ]
    balancing = fields.get("moe_router_load_balancing_type") or "none"
    kinds = balancing if isinstance(balancing, list | tuple) else [balancing]
    if any(kind not in FOLDABLE_BALANCING for kind in kinds):
        found.append(f"model.moe_router_load_balancing_type={balancing!r} (state over steps)")
    if fields.get("position_embedding_type", "rope") not in ("rope", "none"):
        found.append(f"model.position_embedding_type={fields['position_embedding_type']!r}")
    if activation_name(fields) not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        found.append(f"model.activation_func={fields.get('activation_func')!r} (only {known})")
    return found + [f"a model section without {k}" for k in missing_fields(fields)]


def missing_fields(fields: Mapping[str, Any]) -> list[str]:
    """Fields without a default that the saved model section does not state."""
    needed = ("num_layers", "hidden_size", "num_attention_heads")
    return [name for name in needed if fields.get(name) is None]


def activation_name(fields: Mapping[str, Any]) -> str:
    """The dotted name of the activation, by torch's public module."""
    name = fields.get("activation_func") or ASSUMED["activation_func"]
    return str(name).replace("torch._C._nn.", "torch.nn.functional.")


def _dtype(fields: Mapping[str, Any], precision: str) -> str:
    saved = "bfloat16" if fields.get("bf16") else str(fields.get("params_dtype", "float32"))
    wanted = saved if precision == "recorded" else precision
    if wanted not in DTYPES:
        raise UnsupportedModelError(
            fault(RUN_CONFIG, "model.params_dtype", repr(wanted), " or ".join(DTYPES))
        )
    return wanted
