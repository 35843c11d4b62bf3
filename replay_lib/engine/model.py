"""Build the live model: process groups, Megatron's configuration, GPTModel over our layer spec."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replay_lib.engine.model_config import ModelConfig
from replay_lib.engine.rotary import PackedRotary

#: What the replay decides for itself: one step on few ranks, nothing fused, nothing recomputed.
#: None of it changes what the step computes, beyond the order of floating-point sums.
OWN_SETTINGS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
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


@dataclass
class LiveModel:
    """The model on its device, with what the engine needs to know about it."""

    module: nn.Module
    config: Any
    routers: list[Any]
    moe_layers: tuple[bool, ...]
    device: torch.device
    rotary: PackedRotary | None
    topk: int
    experts: int
    vocab: int  # rows of the embedding

    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters by Megatron's module name."""
        return dict(self.module.named_parameters())


def init_groups() -> None:
    """Megatron's process groups for pure data parallelism over all ranks of the default group."""
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(1)


def build_model(
    config: ModelConfig, *, vocab: int, replay: bool, device: torch.device
) -> LiveModel:
    """An uninitialised GPTModel of ``vocab`` rows on ``device``, in training mode.

    ``replay`` attaches Megatron's RouterReplay to every router. Parameters hold garbage until
    weights are loaded; nothing else may read them before.
    """
    from megatron.core.models.gpt import GPTModel

    from replay_lib.engine.dispatch import LocalDispatcher
    from replay_lib.engine.layers import block_spec

    transformer = transformer_config(config, replay=replay)
    module = GPTModel(
        config=transformer,
        transformer_layer_spec=block_spec(transformer, config.moe_layers),
        vocab_size=vocab,
        max_sequence_length=max(config.max_sequence_length, 1),
        parallel_output=True,
        **config.gpt,
    )
    module.to(device)
    module.train()
    moe_layers = [
        layer.mlp
        for layer, moe in zip(module.decoder.layers, config.moe_layers, strict=True)
        if moe
    ]
    for layer in moe_layers:
        layer.token_dispatcher = LocalDispatcher(int(transformer.moe_router_topk))
    rotary = None
    if hasattr(module, "rotary_pos_emb"):
        rotary = module.rotary_pos_emb = PackedRotary(module.rotary_pos_emb)
    return LiveModel(
        module=module,
        config=transformer,
        routers=[layer.router for layer in moe_layers],
        moe_layers=config.moe_layers,
        device=device,
        rotary=rotary,
        topk=int(transformer.moe_router_topk),
        experts=int(transformer.num_moe_experts or 0),
        vocab=vocab,
    )


def transformer_config(config: ModelConfig, *, replay: bool) -> Any:
    """Megatron's TransformerConfig for a saved model and this replay."""
    from megatron.core.transformer import TransformerConfig

    known = set(inspect.signature(TransformerConfig).parameters)
    dtype = getattr(torch, config.dtype)
    values: dict[str, Any] = dict(config.transformer)
    values.update(OWN_SETTINGS)
    values.update(
        activation_func=getattr(F, config.activation),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        moe_enable_routing_replay=replay and any(config.moe_layers),
    )
    return TransformerConfig(**{k: v for k, v in values.items() if k in known})
