"""The model of the oracle: a Mixture-of-Experts transformer in plain float64 torch.

Nothing here comes from Megatron or from the engine: rows are padded ``[B, T]`` and never packed,
attention is a masked matrix product, experts are a loop. It is slow and small on purpose, and
reads like the formulas.

Facts about the architecture (order of the query, key and value rows, rotary angles, router
scores) were read in Megatron-Core 0.16.1: ``transformer/attention.py``,
``models/common/embeddings``, ``transformer/moe/moe_utils.py``.

Legend: B rows, T tokens, L layers, K top-k, E experts, H hidden, V vocabulary, N = B * T,
D channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_lib.errors import UnsupportedModelError, WeightsError, fault

Weights = Mapping[str, Tensor]

#: What this model can be, by field; a field that is absent counts as its first value.
_MODELLED: dict[str, tuple[Any, ...]] = {
    "activation_func": ("torch.nn.functional.silu", "silu"),
    "activation_func_clamp_value": (None,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False, True),
    "apply_query_key_layer_scaling": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_dropout": (0.0,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "gated_linear_unit": (True,),
    "glu_linear_offset": (0.0,),
    "hidden_dropout": (0.0,),
    "layernorm_zero_centered_gamma": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_input_jitter_eps": (None,),
    "moe_latent_size": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_force_load_balancing": (False,),
    # one kind of auxiliary loss; sinkhorn chooses experts differently
    "moe_router_load_balancing_type": ("none", "aux_loss"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "mtp_num_layers": (None,),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None,),
    "normalization": ("RMSNorm", "LayerNorm"),
    "position_embedding_type": ("rope",),
    "qk_l2_norm": (False,),
    "rope_scaling": (False,),
    "rotary_interleaved": (False,),
    "seq_len_interpolation_factor": (None,),
    "softmax_type": ("vanilla",),
    "window_size": (None,),
}


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """Shapes and choices of the model; built by :func:`read_model`."""

    layers: int
    heads: int
    groups: int  # key/value heads
    channels: int  # D
    epsilon: float  # of every norm
    layer_norm: bool  # LayerNorm with a bias instead of RMSNorm
    qkv_bias: bool
    rotary_base: float
    rotary_channels: int  # leading channels of a head that are rotated
    softmax_scale: float
    qk_layernorm: bool
    topk: int
    pre_softmax: bool
    score_function: str
    scaling_factor: float
    expert_groups: int  # of which a token uses the best ``group_topk``; 0: no groups
    group_topk: int
    shared: bool  # an expert that every token gets, beside the chosen ones
    shared_gate: bool  # weighted by a sigmoid of its own
    aux_coeff: float
    z_coeff: float
    moe_layers: tuple[int, ...]  # indices of the layers that hold experts
    tied: bool  # the output layer is the embedding


def read_model(fields: Mapping[str, Any]) -> ReferenceModel:
    """The model of a ``run_config.yaml``'s model section (dtypes and functions as names).

    Raises UnsupportedModelError naming every field that this model does not cover.
    """
    foreign = [
        f"{name}={fields[name]!r}"
        for name, values in _MODELLED.items()
        if name in fields and fields[name] not in values
    ]
    if foreign:
        raise UnsupportedModelError(
            fault("model section", None, ", ".join(foreign), "fields that the oracle models")
        )
    layers, heads = int(fields["num_layers"]), int(fields["num_attention_heads"])
    channels = int(fields.get("kv_channels") or fields["hidden_size"] // heads)
    return ReferenceModel(
        layers=layers,
        heads=heads,
        groups=int(fields.get("num_query_groups") or heads),
        channels=channels,
        epsilon=float(fields.get("layernorm_epsilon", 1e-5)),
        layer_norm=fields.get("normalization") == "LayerNorm",
        qkv_bias=bool(fields.get("add_qkv_bias", False)),
        rotary_base=float(fields.get("rotary_base", 10000)),
        rotary_channels=int(channels * float(fields.get("rotary_percent", 1.0))),
        softmax_scale=float(fields.get("softmax_scale") or channels**-0.5),
        qk_layernorm=bool(fields.get("qk_layernorm", False)),
        topk=int(fields.get("moe_router_topk", 2)),
        pre_softmax=bool(fields.get("moe_router_pre_softmax", False)),
        score_function=str(fields.get("moe_router_score_function", "softmax")),
        scaling_factor=float(fields.get("moe_router_topk_scaling_factor") or 1.0),
        expert_groups=int(fields.get("moe_router_num_groups") or 0),
        group_topk=int(fields.get("moe_router_group_topk") or 0),
        shared=bool(fields.get("moe_shared_expert_intermediate_size")),
        shared_gate=bool(fields.get("moe_shared_expert_gate", False)),
        aux_coeff=_aux_coeff(fields),
        z_coeff=float(fields.get("moe_z_loss_coeff") or 0.0),
        moe_layers=_moe_layers(layers, fields),
        tied=bool(fields.get("share_embeddings_and_output_weights", False)),
    )


def _aux_coeff(fields: Mapping[str, Any]) -> float:
    on = (fields.get("moe_router_load_balancing_type") or "none") == "aux_loss"
    return float(fields.get("moe_aux_loss_coeff") or 0.0) if on else 0.0


def _moe_layers(layers: int, fields: Mapping[str, Any]) -> tuple[int, ...]:
    if not fields.get("num_moe_experts"):
        return ()
    pattern = fields.get("moe_layer_freq", 1)
    if isinstance(pattern, int):
        return tuple(range(0, layers, pattern))
    return tuple(i for i, moe in zip(range(layers), pattern, strict=True) if moe)


def logits(
    model: ReferenceModel,
    weights: Weights,
    ids_BT: Tensor,
    saved_BTLK: Tensor,
    forced_BTL: Tensor,
    *,
    routers: list[Tensor] | None = None,
) -> Tensor:
    """Logits ``[B, T, V]`` in float64.

    ``saved_BTLK`` (int64, L counting all layers) are the saved experts, ``forced_BTL`` (bool, L
    counting MoE layers only) says where they are taken instead of the router's own choice.
    ``routers`` collects each MoE layer's router logits ``[B, T, E]``.
    """
    hidden = _get(weights, "embedding.word_embeddings.weight")[ids_BT]
    for layer in range(model.layers):
        block = _Layer(weights, layer)
        hidden = hidden + _attention(model, block, hidden)
        if layer in model.moe_layers:
            forced_BT = forced_BTL[:, :, model.moe_layers.index(layer)]
            names = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            tokens = _norm_of(model, block, hidden, *names)
            if routers is not None:
                routers.append(tokens @ block["mlp.router.weight"].T)
            hidden = hidden + _experts(model, block, tokens, saved_BTLK[:, :, layer], forced_BT)
        else:
            hidden = hidden + _dense(model, block, hidden)
    final = "decoder.final_layernorm."
    bias = weights.get(f"{final}bias")
    hidden = _normed(model, hidden, _get(weights, f"{final}weight"), bias)
    output = "embedding.word_embeddings.weight" if model.tied else "output_layer.weight"
    return hidden @ _get(weights, output).T


def log_prob_and_entropy(
    logits_BTV: Tensor, labels_BT: Tensor, entropy_top_k: int = -1
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each position, both ``[B, T]`` in nats.

    A label of -100 gets what the trainer's cross-entropy gives it, the maximum minus the
    logsumexp; no loss reads it. ``entropy_top_k`` > 0: entropy among that many largest logits.
    """
    target_BT = logits_BTV.gather(2, labels_BT.clamp(min=0).unsqueeze(2)).squeeze(2)
    target_BT = torch.where(labels_BT >= 0, target_BT, logits_BTV.amax(dim=2))
    log_prob_BT = target_BT - logits_BTV.logsumexp(dim=2)
    if entropy_top_k > 0:
        logits_BTV = logits_BTV.topk(min(entropy_top_k, logits_BTV.shape[2]), dim=2).values
    mean_BT = (logits_BTV.softmax(dim=2) * logits_BTV).sum(dim=2)
    return log_prob_BT, logits_BTV.logsumexp(dim=2) - mean_BT


@dataclass(frozen=True)
class _Layer:
    """One layer's parameters, from checkpoints that stack layers and from those that do not."""

    weights: Weights
    number: int

    def __getitem__(self, name: str) -> Tensor:
        stacked = self.weights.get(f"decoder.layers.{name}")
        if stacked is not None:
            return stacked[self.number]
        return _get(self.weights, f"decoder.layers.{self.number}.{name}")

    def first(self, *names: str) -> Tensor:
        """The parameter under the first of its names that the checkpoint knows."""
        for name in names[:-1]:
            full = (f"decoder.layers.{name}", f"decoder.layers.{self.number}.{name}")
            if any(f in self.weights for f in full):
                return self[name]
        return self[names[-1]]


def _get(weights: Weights, name: str) -> Tensor:
    if name not in weights:
        raise WeightsError(fault("weights", name, "nothing", "a parameter of the model"))
    return weights[name]


def _normed(model: ReferenceModel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The model's norm over the last dimension: of LayerNorm the mean is taken out first."""
    if not model.layer_norm:
        return _rms_norm(x, weight, model.epsilon)
    assert bias is not None, "a LayerNorm has a bias"
    return _rms_norm(x - x.mean(dim=-1, keepdim=True), weight, model.epsilon) + bias


def _norm_of(model: ReferenceModel, block: _Layer, x: Tensor, *names: str) -> Tensor:
    """Normalised by the parameters under the first of ``names`` (without ``weight``) it has."""
    weight = block.first(*(f"{name}weight" for name in names))
    bias = block.first(*(f"{name}bias" for name in names)) if model.layer_norm else None
    return _normed(model, x, weight, bias)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""
    return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight


def _attention(model: ReferenceModel, block: _Layer, hidden: Tensor) -> Tensor:
    """Causal attention of grouped queries; rows of the QKV matrix are, per group, q heads, k, v."""
    norm = _norm_of(model, block, hidden, "self_attention.linear_qkv.layer_norm_")
    mixed = norm @ block["self_attention.linear_qkv.weight"].T
    if model.qkv_bias:
        mixed = mixed + block["self_attention.linear_qkv.bias"]
    share = model.heads // model.groups
    mixed = mixed.view(*mixed.shape[:2], model.groups, share + 2, model.channels)
    query = mixed[:, :, :, :share].flatten(2, 3)
    key, value = mixed[:, :, :, share], mixed[:, :, :, share + 1]
    if model.qk_layernorm:
        query = _norm_of(model, block, query, "self_attention.q_layernorm.")
        key = _norm_of(model, block, key, "self_attention.k_layernorm.")
    query, key = _rotate(model, query), _rotate(model, key)
    key, value = key.repeat_interleave(share, dim=2), value.repeat_interleave(share, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", query, key) * model.softmax_scale
    width = hidden.shape[1]
    past = torch.ones(width, width, dtype=torch.bool).tril()
    attention = scores.masked_fill(~past, float("-inf")).softmax(dim=3)
    mixed = torch.einsum("bhts,bshd->bthd", attention, value).flatten(2)
    return mixed @ block["self_attention.linear_proj.weight"].T


def _rotate(model: ReferenceModel, x: Tensor) -> Tensor:
    """Rotary position embedding of ``[B, T, heads, D]``; channel c is paired with c + half.

    The table of angles is float32 as Megatron-Core computes it for every parameter dtype: it is
    part of the model, not of its precision.
    """
    half = model.rotary_channels // 2
    exponent = torch.arange(0, half * 2, 2, dtype=torch.float32) / (half * 2)
    frequency = 1.0 / (model.rotary_base**exponent)
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), frequency).to(x.dtype)
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    low, high, rest = x.tensor_split([half, half * 2], dim=3)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=3)


def _experts(
    model: ReferenceModel, block: _Layer, normed: Tensor, saved_BTK: Tensor, forced_BT: Tensor
) -> Tensor:
    """Sum over the chosen experts of probability times expert output, and the shared expert."""
    tokens = normed.flatten(0, 1)
    router_NE = tokens @ block["mlp.router.weight"].T
    chosen_NK, probs_NK = route(model, router_NE, saved_BTK.flatten(0, 1), forced_BT.flatten())
    fc1 = block["mlp.experts.experts.linear_fc1.weight"]
    fc2 = block["mlp.experts.experts.linear_fc2.weight"]
    output = torch.zeros_like(tokens)
    for expert in range(fc1.shape[0]):
        token, slot = (chosen_NK == expert).nonzero(as_tuple=True)
        part = _swiglu(tokens[token], fc1[expert], fc2[expert]) * probs_NK[token, slot, None]
        output = output.index_add(0, token, part)
    if model.shared:
        output = output + _shared(model, block, tokens)
    return output.view_as(normed)


def _shared(model: ReferenceModel, block: _Layer, tokens: Tensor) -> Tensor:
    fc1 = block["mlp.shared_experts.linear_fc1.weight"]
    output = _swiglu(tokens, fc1, block["mlp.shared_experts.linear_fc2.weight"])
    if not model.shared_gate:
        return output
    return output * (tokens @ block["mlp.shared_experts.gate_weight"].T).sigmoid()


def auxiliary_loss(model: ReferenceModel, router_BTE: Tensor, counted_BT: Tensor) -> Tensor:
    """One router's own losses over the counted tokens, times their number, as a scalar.

    load balancing = coeff * E / (n * K) * sum_e chosen_e * sum_x P_xe, with P the scores that sum
    to 1 and chosen_e how many of the n tokens have e among their own K best (whatever was
    replayed); z = coeff * sum_x logsumexp(x)^2. Both are means over tokens that Megatron-Core
    multiplies by n where the loss is one a token (``router.py``, ``moe_utils.py``).
    """
    logits_NE = router_BTE[counted_BT]
    tokens, experts = logits_NE.shape
    loss = model.z_coeff * logits_NE.logsumexp(dim=1).square().sum()
    if model.aux_coeff:
        scores = logits_NE.softmax(dim=1)
        if model.score_function == "sigmoid":
            scores = logits_NE.sigmoid() / (logits_NE.sigmoid().sum(dim=1, keepdim=True) + 1e-20)
        own_NK = scores.topk(model.topk, dim=1).indices
        chosen_E = torch.bincount(own_NK.flatten(), minlength=experts)
        balance = (chosen_E * scores.sum(dim=0)).sum() * experts / (tokens * model.topk)
        loss = loss + model.aux_coeff * balance
    return loss


def route(
    model: ReferenceModel, router_NE: Tensor, saved_NK: Tensor, forced_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Experts ``[N, K]`` and their probabilities ``[N, K]``.

    Where ``forced_N`` is true the saved experts are taken; their probabilities come from the
    present scores at those experts, so the router still gets a gradient.
    """
    scores_NE = router_NE
    if model.score_function == "sigmoid":
        scores_NE = router_NE.sigmoid()
    elif model.pre_softmax:
        scores_NE = router_NE.softmax(dim=1)
    own_NK = _inside_groups(model, scores_NE).topk(model.topk, dim=1).indices
    chosen_NK = torch.where(forced_N[:, None], saved_NK, own_NK)
    picked_NK = scores_NE.gather(1, chosen_NK)
    if model.score_function == "sigmoid":
        # one expert a token keeps its score as it is
        total_N1 = picked_NK.sum(dim=1, keepdim=True) + 1e-20 if model.topk > 1 else 1.0
        probs_NK = picked_NK / total_N1
    else:
        probs_NK = picked_NK if model.pre_softmax else picked_NK.softmax(dim=1)
    return chosen_NK, probs_NK * model.scaling_factor


def _inside_groups(model: ReferenceModel, scores_NE: Tensor) -> Tensor:
    """Scores with all but the best groups of experts at -inf.

    A group counts by the sum of its topk / group_topk best scores.
    """
    if not model.expert_groups:
        return scores_NE
    grouped = scores_NE.unflatten(1, (model.expert_groups, -1))
    weight = grouped.topk(model.topk // model.group_topk, dim=2).values.sum(dim=2)
    best = torch.zeros_like(weight).scatter(1, weight.topk(model.group_topk, dim=1).indices, 1.0)
    inside: Tensor = grouped.masked_fill(best[:, :, None] == 0, float("-inf"))
    return inside.flatten(1)


def _dense(model: ReferenceModel, block: _Layer, hidden: Tensor) -> Tensor:
    """The feed-forward part of a layer without experts."""
    norm = _norm_of(model, block, hidden, "mlp.linear_fc1.layer_norm_")
    return _swiglu(norm, block["mlp.linear_fc1.weight"], block["mlp.linear_fc2.weight"])


def _swiglu(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """fc2 (silu(gate x) * up x); the rows of ``fc1`` are the gate's, then the up half's."""
    gate, up = (x @ fc1.T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ fc2.T
