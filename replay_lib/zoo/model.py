"""The tiny model of the zoo: built by the replay's own engine, initialised, and read out whole.

Lives in the zoo's worker process only: Megatron's globals and the CPU shims are in there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replay_lib.engine.groups import init_groups
from replay_lib.engine.model import LiveModel, build_model
from replay_lib.engine.model_config import model_config
from replay_lib.engine.routes import attach
from replay_lib.engine.weights import model_slices
from replay_lib.zoo.recipe import Shape

Weights = dict[str, Tensor]  # whole tensors by checkpoint key, layers and experts stacked


def model_fields(shape: Shape, dtype: str = "float32") -> dict[str, Any]:
    """Megatron's fields of the model, plain values as ``load_model_fields`` gives them."""
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.expert_width,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.channels,
        "layernorm_epsilon": shape.epsilon,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": "torch.nn.functional.silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_width,
        "moe_layer_freq": 1,
        "moe_router_topk": shape.topk,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "position_embedding_type": "rope",
        "rotary_base": shape.rotary_base,
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_length": 128,
        "vocab_size": shape.vocabulary,
        "bf16": dtype == "bfloat16",
        "params_dtype": dtype,
    }


def new_model(shape: Shape, device: torch.device, dtype: str = "float32") -> LiveModel:
    """An uninitialised model with route replay attached."""
    init_groups()
    config = model_config(model_fields(shape, dtype))
    model = build_model(config, vocab=shape.vocabulary, replay=True, device=device)
    attach(model)
    return model


def initialise(model: LiveModel, seed: int) -> None:
    """Norms at 1, matrices normal with deviation 1/sqrt(inputs), what is added to the residual
    stream smaller by sqrt(2 layers) (as GPT-2 has it), embeddings at 0.5."""
    generator = torch.Generator().manual_seed(seed)
    layers = len(model.moe_layers)
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            deviation = parameter.shape[-1] ** -0.5
            if "linear_proj" in name or name.endswith("weight2"):
                deviation /= (2 * layers) ** 0.5
            if "embedding" in name:
                deviation = 0.5
            drawn = torch.randn(parameter.shape, generator=generator) * deviation
            parameter.copy_(drawn)


def whole_tensors(model: LiveModel) -> Weights:
    """Copies of all parameters by checkpoint key, on the model's device."""
    whole: Weights = {}
    for piece in model_slices(model.module):
        if piece.key not in whole:
            whole[piece.key] = piece.view.new_empty(piece.whole)
        target = whole[piece.key]
        for axis, (start, length) in enumerate(zip(piece.offset, piece.view.shape, strict=True)):
            target = target.narrow(axis, start, length)
        target.copy_(piece.view)
    return whole


def load_whole(model: LiveModel, whole: Weights) -> None:
    """The reverse of :func:`whole_tensors`."""
    with torch.no_grad():
        for piece in model_slices(model.module):
            source = whole[piece.key]
            for axis, (start, size) in enumerate(zip(piece.offset, piece.view.shape, strict=True)):
                source = source.narrow(axis, start, size)
            piece.view.copy_(source)
