"""The ``torch`` layer spec: Megatron's GPTModel with plain-torch norms, attention and experts.

Megatron's own ``local`` spec can do neither packed sequences nor sequence-parallel norms, and its
TE spec needs Transformer Engine. These three modules fill that gap through Megatron's official
seam (``ModuleSpec``); everything else (embedding, QKV, router, dispatcher, output) is Megatron's.

Legend: N packed tokens, H hidden, A query heads, G key/value groups, D head width, M tokens
dispatched to this rank's experts, E local experts, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn
from torch.nn import functional as F

from replay_lib.engine.attention import packed_attention
from replay_lib.engine.attention_ranks import context_attention

Config = Any  # megatron's TransformerConfig; megatron-core ships no types for mypy


class TorchNorm(nn.Module):
    """RMSNorm or LayerNorm whose parameters carry the sequence-parallel mark.

    Megatron sums the gradients of marked parameters over tensor-parallel ranks; its own torch
    norm lacks the mark. Statistics are taken in float32, the output has the input's dtype.
    """

    def __init__(
        self, config: Config, hidden_size: int, eps: float = 1e-5, **_megatron: Any
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.shape = (hidden_size,)
        self.eps = eps
        self.rms = config.normalization == "RMSNorm"
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.bias = None
        if not self.rms:
            self.bias = nn.Parameter(torch.empty_like(self.weight))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of ``x``."""
        weight = self.weight + self.offset if self.offset else self.weight
        if self.rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)


class TorchAttention(MegatronModule):
    """Core attention over packed rows, causal inside a row, by scaled-dot-product attention."""

    def __init__(
        self,
        config: Config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_megatron: Any,
    ) -> None:
        super().__init__(config=config)
        head_width = config.kv_channels
        self.scale = softmax_scale or config.softmax_scale or head_width**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **_megatron: Any,
    ) -> Tensor:
        """Attend ``query [N, A, D]`` to ``key, value [N, G, D]``; returns ``[N, A * D]``."""
        rows = packed_seq_params.rows
        attend = packed_attention if rows.context.size == 1 else context_attention
        out = attend(query, key, value, rows, self.scale)
        return out.reshape(out.shape[0], -1)


class TorchExperts(MegatronModule):
    """SwiGLU (or plain) experts by grouped matrix products over tokens sorted by expert.

    ``weight1`` is ``[E, 2F, H]`` (gate rows, then up rows) and ``weight2`` ``[E, H, F]``, the
    layout in which checkpoints hold them (``mlp.experts.experts.linear_fc{1,2}.weight``).
    """

    def __init__(
        self, num_local_experts: int, config: Config, pg_collection: Any = None, **_megatron: Any
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.dp_group = pg_collection.expt_dp
        inner = config.moe_ffn_hidden_size
        outer = 2 * inner if config.gated_linear_unit else inner
        options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        shape1 = (num_local_experts, outer, config.hidden_size)
        shape2 = (num_local_experts, config.hidden_size, inner)
        self.weight1 = nn.Parameter(torch.empty(*shape1, **options))
        self.weight2 = nn.Parameter(torch.empty(*shape2, **options))
        # False: gradients are summed over the ranks with the same experts, not over dp x cp. With
        # tensor parallelism those are others even where every rank has all experts, since each
        # rank routes its own part of the tokens.
        same = self.ep_group.size() == 1 and pg_collection.tp.size() == 1
        for parameter in (self.weight1, self.weight2):
            parameter.allreduce = same  # type: ignore[attr-defined]
            parameter.expert = True  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor, *_routing: Any
    ) -> tuple[Tensor, None]:
        """Run ``hidden [M, H]``, sorted by expert, and weight it by ``probs [M]``."""
        ends = tokens_per_expert.to(hidden.device, torch.int32).cumsum(0, dtype=torch.int32)
        if self.config.moe_apply_probs_on_input:
            hidden = (hidden * probs.unsqueeze(-1)).to(hidden.dtype)
            probs = torch.ones_like(probs)
        inner = grouped_linear(hidden, self.weight1, ends)
        inner = self._activate(inner)
        # Megatron weights by the probability before the second product, in the router's dtype.
        inner = (inner * probs.unsqueeze(-1)).to(hidden.dtype)
        return grouped_linear(inner, self.weight2, ends), None

    def _activate(self, inner: Tensor) -> Tensor:
        if not self.config.gated_linear_unit:
            return torch.as_tensor(self.config.activation_func(inner))
        gate, up = inner.chunk(2, dim=-1)
        return torch.as_tensor(self.config.activation_func(gate) * up)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Both weights under the keys that Megatron's own expert modules use."""
        rank, size = self.ep_group.rank(), self.ep_group.size()
        axis = len(sharded_offsets)
        shards: dict[str, Any] = {}
        for number, weight in ((1, self.weight1), (2, self.weight2)):
            shards[f"{prefix}weight{number}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.linear_fc{number}.weight",
                weight,
                *sharded_offsets,
                (axis, rank, size),
                replica_id=(0, 0, self.dp_group.rank()),
                prepend_axis_num=axis,
            )
        return shards


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``x [M, I]`` times ``weight [E, O, I]`` transposed, rows of expert e ending at ``ends[e]``.

    ``F.grouped_mm`` wants rows of 16 bytes' multiple; other shapes go expert by expert.
    """
    aligned = all(n * x.element_size() % 16 == 0 for n in weight.shape[1:])
    if aligned and x.shape[0] > 0:
        return torch.as_tensor(_GroupedLinear.apply(x, weight, ends))
    parts = torch.tensor_split(x, ends[:-1].cpu().long())
    return torch.cat([part @ w.T for part, w in zip(parts, weight, strict=True)])


class _GroupedLinear(torch.autograd.Function):
    """Grouped product whose backward hands contiguous gradients to ``F.grouped_mm``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = F.grouped_mm(grad.transpose(-2, -1), x, offs=ends)
        return grad_x, grad_w, None


class TorchSharedExperts(SharedExpertMLP):
    """Megatron's shared expert with its linear layers named here.

    Megatron 0.16 builds it from a ModuleSpec and 0.19 from a callable; a class is both.
    """

    def __init__(self, config: Config, **megatron: Any) -> None:
        super().__init__(config, submodules=LINEAR, **megatron)


LINEAR = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def layer_spec(config: Config, *, moe: bool) -> ModuleSpec:
    """Spec of one transformer layer, MoE or dense, with the checkpoint keys of production runs."""
    qk_norm = TorchNorm if config.qk_layernorm else IdentityOp
    # In Transformer Engine's layers the norm lives inside the following linear layer.
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if moe:
        mlp = ModuleSpec(
            module=MoELayer,
            submodules=MoESubmodules(experts=TorchExperts, shared_experts=TorchSharedExperts),
        )
    else:
        mlp = ModuleSpec(module=MLP, submodules=LINEAR)
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=TorchAttention,
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


def block_spec(config: Config, moe_layers: tuple[bool, ...]) -> TransformerBlockSubmodules:
    """Spec of the whole decoder: one layer spec a layer, and the final norm."""
    specs = [layer_spec(config, moe=moe) for moe in moe_layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchNorm)
