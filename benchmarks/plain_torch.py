"""The engine's forward and backward against the same shape in plain torch, in one run.

    python benchmarks/plain_torch.py OUT.json [--shape small|large] [--device auto|cpu|cuda]

Plain torch: scaled-dot-product attention over padded rows, experts by grouped matrix products,
routes given, nothing checked, nothing forced through Megatron. That is the distance to close.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import synthetic
import torch
from environment import environment
from synthetic import SHAPES, Shape
from torch import Tensor
from torch.nn import functional as F

from replay_lib.engine.machine import has_cuda
from replay_lib.engine.session import ReplaySession
from replay_lib.snapshot import load_batch, open_snapshot, read_tensors

PASSES = 12


@dataclass(frozen=True)
class Given:
    """What every layer shares: routes ``[L, B * T, K]`` and the rotary table ``[T, 1, D]``."""

    routes: Tensor
    cos: Tensor
    sin: Tensor


def layer(x: Tensor, w: dict[str, Tensor], i: int, given: Given, shape: Shape) -> Tensor:
    """One transformer layer on ``x [B, T, H]``."""
    name = "decoder.layers."
    h = F.rms_norm(
        x, (shape.hidden,), w[f"{name}self_attention.linear_qkv.layer_norm_weight"][i], 1e-6
    )
    x = x + attention(h, w, i, given, shape)
    h = F.rms_norm(x, (shape.hidden,), w[f"{name}pre_mlp_layernorm.weight"][i], 1e-6)
    return x + experts(h.flatten(0, 1), w, i, given.routes[i], shape).view_as(x)


def attention(h: Tensor, w: dict[str, Tensor], i: int, given: Given, shape: Shape) -> Tensor:
    """Grouped-query attention with rotary embeddings, causal."""
    name, d = "decoder.layers.self_attention.", shape.channels
    per_group = shape.heads // shape.groups
    qkv = h @ w[f"{name}linear_qkv.weight"][i].T
    qkv = qkv.view(*h.shape[:2], shape.groups, per_group + 2, d)
    q, k, v = qkv.split([per_group, 1, 1], dim=3)
    q = rotate(F.rms_norm(q.flatten(2, 3), (d,), w[f"{name}q_layernorm.weight"][i], 1e-6), given)
    k = rotate(F.rms_norm(k.flatten(2, 3), (d,), w[f"{name}k_layernorm.weight"][i], 1e-6), given)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v.flatten(2, 3)))
    k, v = (t.repeat_interleave(per_group, dim=1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2) @ w[f"{name}linear_proj.weight"][i].T


def rotate(t: Tensor, given: Given) -> Tensor:
    """Rotary embedding of ``t [B, T, A, D]`` from position 0."""
    d = t.shape[-1]
    half = torch.cat([-t[..., d // 2 :], t[..., : d // 2]], dim=-1)
    return t * given.cos + half * given.sin


def rotary_table(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, 1, D]`` in the model's dtype."""
    inverse = 10000.0 ** (-torch.arange(0, shape.channels, 2) / shape.channels)
    angle = torch.arange(shape.length).outer(inverse).repeat(1, 2)[:, None]
    dtype = getattr(torch, shape.dtype)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def experts(x: Tensor, w: dict[str, Tensor], i: int, routes: Tensor, shape: Shape) -> Tensor:
    """SwiGLU experts of ``x [N, H]``, sorted by expert, weighted by the router's softmax."""
    name = "decoder.layers.mlp."
    scores = (x.float() @ w[f"{name}router.weight"][i].float().T).gather(1, routes)
    probs = scores.softmax(dim=-1)
    order = routes.flatten().argsort(stable=True)
    numbers = torch.arange(shape.experts, device=x.device)
    counts = (routes.flatten()[:, None] == numbers).sum(dim=0)
    ends = counts.cumsum(0, dtype=torch.int32)
    picked = x[order // shape.topk]
    fc1 = w[f"{name}experts.experts.linear_fc1.weight"][i]
    gate, up = F.grouped_mm(picked, fc1.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    inner = (F.silu(gate) * up * probs.flatten()[order][:, None]).to(x.dtype)
    fc2 = w[f"{name}experts.experts.linear_fc2.weight"][i]
    out = F.grouped_mm(inner.contiguous(), fc2.transpose(-2, -1), offs=ends)
    back = order.argsort()
    return out[back].view(-1, shape.topk, shape.hidden).sum(dim=1)


def plain_seconds(snapshot: Path, shape: Shape, device: str) -> list[float]:
    """Seconds of forward and backward passes in plain torch."""
    w = {k: v.to(device).requires_grad_() for k, v in read_tensors(snapshot).items()}
    batch = load_batch(open_snapshot(snapshot), 0)
    tokens = batch.input_ids.to(device)
    labels = batch.labels.clamp(min=0).to(device)
    routes = [F.pad(r.long(), (0, 0, 0, 0, 0, 1)) for r in batch.routes]
    stacked = torch.cat(routes).permute(1, 0, 2).contiguous().to(device)
    given = Given(stacked, *rotary_table(shape, device))
    seconds = []
    for _ in range(PASSES):
        start = time.perf_counter()
        x = F.embedding(tokens, w["embedding.word_embeddings.weight"])
        for i in range(shape.layers):
            x = layer(x, w, i, given, shape)
        x = F.rms_norm(x, (shape.hidden,), w["decoder.final_layernorm.weight"], 1e-6)
        logits = (x @ w["output_layer.weight"].T).float()
        log_prob = logits.log_softmax(-1).gather(-1, labels[..., None])
        log_prob.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        for tensor in w.values():
            tensor.grad = None
    return seconds


def engine_seconds(snapshot: Path, device: str, *, deterministic: bool) -> list[float]:
    """Seconds of the engine's bare passes: forward with forced routes and backward."""
    with ReplaySession.open(snapshot, device=device, deterministic=deterministic) as session:
        return session.bare_seconds(PASSES)


def compare(shape_name: str, device: str) -> dict[str, Any]:
    """Best pass of each, and the ratios."""
    shape = SHAPES[shape_name]
    with tempfile.TemporaryDirectory() as scratch:
        snapshot = synthetic.write(Path(scratch), shape)
        free = min(engine_seconds(snapshot, device, deterministic=False)[2:])
        fixed = min(engine_seconds(snapshot, device, deterministic=True)[2:])
        plain = min(plain_seconds(snapshot, shape, device)[2:])
    return {
        "shape": shape_name,
        "device": device,
        "dtype": shape.dtype,
        "tokens": shape.rows * shape.length,
        "plain_seconds": plain,
        "engine_seconds": free,
        "engine_deterministic_seconds": fixed,
        "engine_over_plain": free / plain,
        "deterministic_over_free": fixed / free,
    }


def main() -> None:
    """Measure, write OUT and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    auto = "cuda" if has_cuda() else "cpu"
    row = compare(options.shape, auto if options.device == "auto" else options.device)
    document = {"benchmark": "plain_torch", "environment": environment(), "rows": [row]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
