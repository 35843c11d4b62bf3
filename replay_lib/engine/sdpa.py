"""Causal scaled-dot-product attention, deterministic where that was asked for.

Legend: B rows, A query heads, G key/value groups, Q queries, P keys before them, D head width.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

#: Flash, cuDNN and varlen attention vary in dQ from run to run even in torch's deterministic mode
#: (seen on an H200, torch 2.11, bfloat16); memory-efficient and math attention do not.
DETERMINISTIC_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``[B, Q, A, D]`` from ``query [B, Q, A, D]`` and ``key, value [B, P + Q, G, D]``.

    Query i sees keys 0 to P + i; key and value groups are repeated for their queries.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    strict = q.is_cuda and torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(DETERMINISTIC_BACKENDS) if strict else contextlib.nullcontext():
        if q.shape[2] == k.shape[2]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = causal_lower_right(q.shape[2], k.shape[2])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)
