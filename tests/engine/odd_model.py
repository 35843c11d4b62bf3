"""A snapshot whose model has what the embedded one lacks, for replays on several ranks.

A dense layer before MoE layers (so each layer has keys of its own), tied embeddings, a gated shared
expert, attention biases, auxiliary losses; three data-parallel ranks with micro-batches of two
rows, one rank with half as many as the others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import yaml

from replay_lib.snapshot import open_snapshot, read_content, write_snapshot

L, E, H, FF, SHARED, V = 4, 8, 64, 32, 48, 128
QKV, HEADS = 128, 64
DENSE = (0,)


def write_odd_snapshot(directory: Path, source: Path) -> Path:
    """Write it into ``directory``; rows and routes are those of ``source``, the embedded one."""
    content = read_content(open_snapshot(source))
    one, other = content.batches
    batches = (one.select(range(4)), other.select(range(4)), one.select([4, 5]))
    worker = dict(content.worker_config) | {
        "dp_size": len(batches),
        "use_dynamic_batch_size": False,
        "train_micro_batch_size": 2,
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss",
    }
    document = yaml.safe_load(content.run_config)
    document["model"] |= {
        "moe_layer_freq": [int(layer not in DENSE) for layer in range(L)],
        "ffn_hidden_size": FF,
        "share_embeddings_and_output_weights": True,
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": SHARED,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.001,
    }
    changed = replace(
        content,
        worker_config=worker,
        run_config=yaml.safe_dump(document),
        batches=tuple(replace(b, dp_rank=rank) for rank, b in enumerate(batches)),
        tensors=odd_weights(),
        grad_info={},
        handles=None,
    )
    return write_snapshot(directory / "iter_0000085", changed).path


def odd_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by checkpoint name, one name a layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        spread = 0.1 if len(size) == 1 else size[-1] ** -0.5
        return torch.randn(*size, generator=generator) * spread + (1.0 if len(size) == 1 else 0.0)

    shapes = {
        "self_attention.linear_qkv.layer_norm_weight": (H,),
        "self_attention.linear_qkv.weight": (QKV, H),
        "self_attention.linear_qkv.bias": (QKV,),
        "self_attention.linear_proj.weight": (H, HEADS),
        "self_attention.q_layernorm.weight": (16,),
        "self_attention.k_layernorm.weight": (16,),
    }
    dense = {
        "mlp.linear_fc1.layer_norm_weight": (H,),
        "mlp.linear_fc1.weight": (2 * FF, H),
        "mlp.linear_fc2.weight": (H, FF),
    }
    moe = {
        "pre_mlp_layernorm.weight": (H,),
        "mlp.router.weight": (E, H),
        "mlp.experts.experts.linear_fc1.weight": (E, 2 * FF, H),
        "mlp.experts.experts.linear_fc2.weight": (E, H, FF),
        "mlp.shared_experts.linear_fc1.weight": (2 * SHARED, H),
        "mlp.shared_experts.linear_fc2.weight": (H, SHARED),
        "mlp.shared_experts.gate_weight": (1, H),
    }
    tensors = {
        "embedding.word_embeddings.weight": draw(V, H),
        "decoder.final_layernorm.weight": draw(H),
    }
    for layer in range(L):
        for name, size in {**shapes, **(dense if layer in DENSE else moe)}.items():
            tensors[f"decoder.layers.{layer}.{name}"] = draw(*size)
    return tensors
