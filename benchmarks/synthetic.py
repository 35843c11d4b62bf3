"""A snapshot of a chosen shape with random weights: what the speed benchmarks replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from replay_lib.batch import RankBatch
from replay_lib.snapshot import open_snapshot, read_content, write_snapshot

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A MoE transformer and one micro-batch: ``rows`` rows of ``length`` tokens."""

    layers: int
    hidden: int
    heads: int
    groups: int
    channels: int  # of a head
    experts: int
    topk: int
    inner: int  # width of an expert
    vocab: int
    rows: int
    length: int
    dtype: str = "float32"


SHAPES = {
    "small": Shape(
        layers=4,
        hidden=256,
        heads=8,
        groups=4,
        channels=32,
        experts=16,
        topk=2,
        inner=256,
        vocab=2048,
        rows=8,
        length=256,
    ),
    # 0.7B parameters and 8192 tokens: large enough to fill a GPU
    "large": Shape(
        layers=12,
        hidden=1024,
        heads=16,
        groups=4,
        channels=64,
        experts=32,
        topk=4,
        inner=512,
        vocab=32768,
        rows=8,
        length=1024,
        dtype="bfloat16",
    ),
}


def write(directory: Path, shape: Shape, seed: int = 0) -> Path:
    """Write a snapshot of ``shape`` into ``directory`` (one data-parallel rank, routes forced)."""
    content = read_content(open_snapshot(EMBEDDED))
    generator = torch.Generator().manual_seed(seed)
    tensors = weights(shape, generator)
    worker = dict(content.worker_config)
    worker |= {"dp_size": 1, "use_dynamic_batch_size": False, "bf16": shape.dtype == "bfloat16"}
    worker |= {"train_micro_batch_size": shape.rows}
    worker["model"] = {**worker["model"], "seq_length": shape.length}
    changed = replace(
        content,
        worker_config=worker,
        run_config=_run_config(content.run_config, shape),
        batches=(_batch(shape, generator),),
        tensors=tensors,
        grad_info={},
        handles=None,
    )
    return write_snapshot(directory / "iter_0000085", changed).path


def weights(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random weights by checkpoint name, standard deviation 0.02, norms 1."""
    s, layer = shape, "decoder.layers."
    qkv = (s.heads + 2 * s.groups) * s.channels
    dtype = getattr(torch, s.dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).mul_(0.02).to(dtype)

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(*size, dtype=dtype)

    return {
        "embedding.word_embeddings.weight": normal(s.vocab, s.hidden),
        "output_layer.weight": normal(s.vocab, s.hidden),
        "decoder.final_layernorm.weight": ones(s.hidden),
        f"{layer}self_attention.linear_qkv.layer_norm_weight": ones(s.layers, s.hidden),
        f"{layer}self_attention.linear_qkv.weight": normal(s.layers, qkv, s.hidden),
        f"{layer}self_attention.linear_proj.weight": normal(
            s.layers, s.hidden, s.heads * s.channels
        ),
        f"{layer}self_attention.q_layernorm.weight": ones(s.layers, s.channels),
        f"{layer}self_attention.k_layernorm.weight": ones(s.layers, s.channels),
        f"{layer}pre_mlp_layernorm.weight": ones(s.layers, s.hidden),
        f"{layer}mlp.router.weight": normal(s.layers, s.experts, s.hidden),
        f"{layer}mlp.experts.experts.linear_fc1.weight": normal(
            s.layers, s.experts, 2 * s.inner, s.hidden
        ),
        f"{layer}mlp.experts.experts.linear_fc2.weight": normal(
            s.layers, s.experts, s.hidden, s.inner
        ),
    }


def _run_config(text: str, shape: Shape) -> str:
    document = yaml.safe_load(text)
    bfloat16 = shape.dtype == "bfloat16"
    document["model"] |= {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.channels,
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": shape.inner,
        "ffn_hidden_size": shape.inner,
        "vocab_size": shape.vocab,
        "seq_length": shape.length,
        "bf16": bfloat16,
        "params_dtype": {"_call_": False, "_target_": f"torch.{shape.dtype}"},
    }
    return yaml.safe_dump(document)


def _batch(shape: Shape, generator: torch.Generator) -> RankBatch:
    size = (shape.rows, shape.length)
    tokens = torch.randint(0, shape.vocab, size, generator=generator)
    loss_mask = torch.zeros(size, dtype=torch.bool)
    loss_mask[:, shape.length // 4 : -1] = True
    labels = torch.where(loss_mask, tokens.roll(-1, 1), -100)
    scores = torch.rand(*size, shape.layers, shape.experts, generator=generator)
    routes = scores.topk(shape.topk, dim=-1).indices.to(torch.int16)
    logprob = -torch.rand(size, generator=generator) * loss_mask
    return RankBatch(
        dp_rank=0,
        index=torch.arange(shape.rows),
        input_ids=tokens,
        labels=labels,
        loss_mask=loss_mask,
        attention_mask=torch.ones(size, dtype=torch.bool),
        advantage=torch.randn(size, generator=generator) * loss_mask,
        old_logprobs=logprob,
        rollout_logprobs=logprob + 0.01 * loss_mask,
        ref_logprobs=logprob.clone(),
        trajectory_id=torch.arange(shape.rows),
        reward=torch.zeros(shape.rows),
        reward_baseline=torch.zeros(shape.rows),
        routes=tuple(r[: shape.length - 1] for r in routes),
    )
