"""The model of one rank as a training job builds it: GPTModel chunks, buffers and optimizer."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from replay_lib.engine.layers import TorchNorm, TorchSharedExperts
from replay_lib.engine.layout import Layout
from replay_lib.engine.model import transformer_config
from replay_lib.engine.model_config import ModelConfig
from replay_lib.snapshot.model import Parallel
from replay_lib.zoo.native.attention import RowAttention

LINEAR = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


class Experts(SequentialMLP):
    """Megatron's experts, one after another, with their linear layers named here.

    Megatron 0.16 builds them from a ModuleSpec and 0.19 from a callable; a class is both.
    """

    def __init__(self, *given: Any, **megatron: Any) -> None:
        super().__init__(*given, **megatron, submodules=LINEAR)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # Gradients are summed over the ranks that have the same experts. Megatron-Core 0.16
            # leaves this out where there is tensor but no expert parallelism, so that each rank
            # keeps the gradient of its own tokens alone; 0.19 has mended it.
            for parameter in self.parameters():
                parameter.allreduce = False


def join_groups(parallel: Parallel) -> None:
    """Megatron's process groups over all ranks of the default group."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,
    )
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(1)


def leave_groups() -> None:
    """Forget the groups, so that another layout of as many ranks can follow."""
    parallel_state.destroy_model_parallel()
    gc.collect()  # hooks hold modules and buffers in cycles


def build_chunks(
    config: ModelConfig, parallel: Parallel, *, vocab: int, replay: bool, device: torch.device
) -> list[Any]:
    """This rank's chunks of the model (one a virtual pipeline stage), in gradient buffers.

    Parameters hold what Megatron initialises them with until weights are loaded.
    """
    transformer = _transformer(config, parallel, replay)
    chunks = [_chunk(config, transformer, parallel, n, vocab) for n in range(parallel.vpp or 1)]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        average_in_collective=False,
        use_distributed_optimizer=False,
    )
    wrapped = []
    for number, chunk in enumerate(chunks):
        chunk.to(device)
        module = Float16Module(transformer, chunk) if transformer.bf16 else chunk
        wrapped.append(
            DistributedDataParallel(transformer, settings, module, disable_bucketing=number > 0)
        )
        wrapped[-1].train()
    return wrapped


def new_optimizer(chunks: list[Any], *, bf16: bool, clip_grad: float) -> Any:
    """Megatron's optimizer: asked for the gradient norm and for clipping, never for a step."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        min_lr=0.0,
        weight_decay=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        clip_grad=clip_grad,
        use_distributed_optimizer=False,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def _transformer(config: ModelConfig, parallel: Parallel, replay: bool) -> Any:
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep", "dp")}
    base = transformer_config(config, replay=replay, layout=Layout(**sizes))
    return dataclasses.replace(
        base,
        context_parallel_size=parallel.cp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        perform_initialization=True,  # marks the shards, too
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        # With two stages of two chunks each both neighbours are the same rank: activations and
        # gradients of one batched exchange would be taken for each other. Megatron's own trainer
        # refuses that, too.
        overlap_p2p_comm=parallel.vpp is not None,
        batch_p2p_comm=parallel.vpp is None,
    )


def _chunk(
    config: ModelConfig, transformer: Any, parallel: Parallel, number: int, vocab: int
) -> Any:
    stage = number if parallel.vpp else None
    first = get_transformer_layer_offset(transformer, vp_stage=stage)
    here = config.moe_layers[first : first + get_num_layers_to_build(transformer, vp_stage=stage)]
    spec = TransformerBlockSubmodules(
        layer_specs=[_layer(transformer, moe) for moe in here], layer_norm=TorchNorm
    )
    at = {"ignore_virtual": False, "vp_stage": stage}
    chunk = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=max(config.max_sequence_length, 1),
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        parallel_output=True,
        vp_stage=stage,
        **config.gpt,
    )
    chunk.model_type = None
    return chunk


def _layer(transformer: Any, moe: bool) -> ModuleSpec:
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    mlp = ModuleSpec(module=MLP, submodules=LINEAR)
    if moe:
        parts = MoESubmodules(experts=Experts, shared_experts=TorchSharedExperts)
        mlp = ModuleSpec(module=MoELayer, submodules=parts)
    else:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    qk_norm = TorchNorm if transformer.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=RowAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=TorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )
