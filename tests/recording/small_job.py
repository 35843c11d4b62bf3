"""A job of a small torch module whose fields describe it: enough to be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from steps import SETTINGS, batches

from replay_lib.recorder import Observation, SpikeRecorder, StepSettings, torch_job

LAYERS, HIDDEN, INNER = 2, 16, 24
FIELDS: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": INNER,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "torch.nn.functional.silu",
    "share_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
#: Of a layer, by the attribute's name: its place and shape.
INSIDE = {
    "norm1": ("self_attention.linear_qkv.layer_norm_weight", (HIDDEN,)),
    "qkv": ("self_attention.linear_qkv.weight", (2 * HIDDEN, HIDDEN)),
    "proj": ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN)),
    "norm2": ("mlp.linear_fc1.layer_norm_weight", (HIDDEN,)),
    "fc1": ("mlp.linear_fc1.weight", (2 * INNER, HIDDEN)),
    "fc2": ("mlp.linear_fc2.weight", (HIDDEN, INNER)),
}
HOW = StepSettings(micro_batch_size=8, seq_length=64)
NAMES = {
    "embed": "embedding.word_embeddings.weight",
    "final": "decoder.final_layernorm.weight",
    **{
        f"{name}_{layer}": f"decoder.layers.{place}[{layer}]"
        for name, (place, _) in INSIDE.items()
        for layer in range(LAYERS)
    },
}
#: Tensors of a checkpoint: layers are stacked.
KEYS = {place.partition("[")[0] for place in NAMES.values()}
QUIET = [1.0, 1.1, 0.9, 1.2, 1.1]


class Small(torch.nn.Module):
    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.ones(rows, HIDDEN))
        self.final = torch.nn.Parameter(torch.ones(HIDDEN))
        for name, (_, shape) in INSIDE.items():
            for layer in range(LAYERS):
                self.register_parameter(f"{name}_{layer}", torch.nn.Parameter(torch.ones(shape)))
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)


def new_recorder(
    home: Path, rows: int = 40, fields: dict[str, Any] = FIELDS, **options: Any
) -> SpikeRecorder:
    """Its window is filled: a norm above 2.2 is a spike at any step from 10 on."""
    job = torch_job(Small(rows), names=NAMES, fields=fields, settings=SETTINGS, step=HOW)
    return SpikeRecorder(home, job=job, history=QUIET, quiet_every=0, **options)


def batch_of(rank: int = 0) -> dict[str, Any]:
    return batches(rank, 24, None)[0]


def spike(recorder: SpikeRecorder, step: int, norm: float = 9.0, rank: int = 0) -> Observation:
    return recorder.observe(step, norm, batch_of(rank))
