"""A small Mixture-of-Experts language model in plain torch, with names and matrices of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from replay_lib.engine.reference_model import logits, read_model
from replay_lib.zoo.model import model_fields
from replay_lib.zoo.recipe import Shape

SHAPE = Shape(
    layers=2, hidden=16, heads=4, groups=2, channels=4, experts=4, expert_width=8, vocabulary=24
)
FIELDS = model_fields(SHAPE)


def _drawn(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * 0.2)


class Layer(nn.Module):
    def __init__(self, s: Shape = SHAPE) -> None:
        super().__init__()
        self.norm1 = nn.Parameter(torch.ones(s.hidden))
        self.norm2 = nn.Parameter(torch.ones(s.hidden))
        self.q_norm = nn.Parameter(torch.ones(s.channels))
        self.k_norm = nn.Parameter(torch.ones(s.channels))
        self.q = _drawn(s.groups, s.heads // s.groups * s.channels, s.hidden)
        self.k = _drawn(s.groups, s.channels, s.hidden)
        self.v = _drawn(s.groups, s.channels, s.hidden)
        self.o = _drawn(s.hidden, s.heads * s.channels)
        self.router = _drawn(s.experts, s.hidden)
        self.gate = _drawn(s.experts, s.expert_width, s.hidden)
        self.up = _drawn(s.experts, s.expert_width, s.hidden)
        self.down = _drawn(s.experts, s.hidden, s.expert_width)


class PlainMoe(nn.Module):
    """Logits ``[B, T, V]`` of token ids; experts are the model's own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(SHAPE.layers))
        self.embed = _drawn(SHAPE.vocabulary, SHAPE.hidden)
        self.final = nn.Parameter(torch.ones(SHAPE.hidden))
        self.head = _drawn(SHAPE.vocabulary, SHAPE.hidden)
        self.shape = read_model(FIELDS)

    def forward(self, ids_BT: Tensor) -> Tensor:
        own = [dict(layer.named_parameters()) for layer in self.layers]
        stacked = {name: torch.stack([layer[name] for layer in own]) for name in own[0]}
        qkv = torch.cat([stacked["q"], stacked["k"], stacked["v"]], dim=2).flatten(1, 2)
        weights = {
            "embedding.word_embeddings.weight": self.embed,
            "output_layer.weight": self.head,
            "decoder.final_layernorm.weight": self.final,
            f"{IN}self_attention.linear_qkv.layer_norm_weight": stacked["norm1"],
            f"{IN}self_attention.linear_qkv.weight": qkv,
            f"{IN}self_attention.linear_proj.weight": stacked["o"],
            f"{IN}self_attention.q_layernorm.weight": stacked["q_norm"],
            f"{IN}self_attention.k_layernorm.weight": stacked["k_norm"],
            f"{IN}pre_mlp_layernorm.weight": stacked["norm2"],
            f"{IN}mlp.router.weight": stacked["router"],
            f"{FC}1.weight": torch.cat([stacked["gate"], stacked["up"]], dim=2),
            f"{FC}2.weight": stacked["down"],
        }
        rows, width = ids_BT.shape
        saved = torch.zeros(rows, width, SHAPE.layers, SHAPE.topk, dtype=torch.int64)
        free = torch.zeros(rows, width, SHAPE.layers, dtype=torch.bool)
        return logits(self.shape, weights, ids_BT, saved, free)


IN = "decoder.layers."
FC = f"{IN}mlp.experts.experts.linear_fc"


def place_names() -> dict:
    """Each parameter's place in a Megatron checkpoint."""
    names: dict = {
        "embed": "embedding.word_embeddings.weight",
        "head": "output_layer.weight",
        "final": "decoder.final_layernorm.weight",
    }
    share, width = SHAPE.heads // SHAPE.groups, SHAPE.expert_width
    group = (share + 2) * SHAPE.channels  # rows of a group of the fused matrix
    starts = {"q": 0, "k": share * SHAPE.channels, "v": (share + 1) * SHAPE.channels}
    whole = {
        "norm1": "self_attention.linear_qkv.layer_norm_weight",
        "norm2": "pre_mlp_layernorm.weight",
        "q_norm": "self_attention.q_layernorm.weight",
        "k_norm": "self_attention.k_layernorm.weight",
        "o": "self_attention.linear_proj.weight",
        "router": "mlp.router.weight",
        "down": "mlp.experts.experts.linear_fc2.weight",
    }
    for layer in range(SHAPE.layers):
        for name, key in whole.items():
            names[f"layers.{layer}.{name}"] = f"{IN}{key}[{layer}]"
        for name, start in starts.items():
            names[f"layers.{layer}.{name}"] = _in_groups(layer, start, group)
        for name, start in (("gate", 0), ("up", width)):
            names[f"layers.{layer}.{name}"] = _in_experts(layer, start)
    return names


def _in_groups(layer: int, start: int, group: int):
    def split(whole: Tensor) -> dict[str, Tensor]:
        key = f"{IN}self_attention.linear_qkv.weight"
        spans = [(g * group + start, part) for g, part in enumerate(whole)]
        return {f"{key}[{layer}, {at}:{at + len(part)}]": part for at, part in spans}

    return split


def _in_experts(layer: int, start: int):
    def split(whole: Tensor) -> dict[str, Tensor]:
        stop = start + whole.shape[1]
        return {f"{FC}1.weight[{layer}, {e}, {start}:{stop}]": w for e, w in enumerate(whole)}

    return split
