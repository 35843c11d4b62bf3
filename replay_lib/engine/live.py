"""What a built model really runs with, read off its configuration and, before that, its modules."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import Any

import torch
from torch import nn

from replay_lib.engine.layers import TorchAttention, TorchNorm
from replay_lib.engine.model import LiveModel


def live_values(model: LiveModel) -> dict[str, Any]:
    """Plain values by the saved model section's names.

    A dtype is its name, a function its dotted name, an enum its member's name. Where the modules
    of this rank's stage do not agree on a value, it is the sorted list of what they have.
    """
    values = {
        f.name: plain(getattr(model.config, f.name)) for f in dataclasses.fields(model.config)
    }
    module: Any = model.module
    values["vocab_size"] = model.vocab
    values["share_embeddings_and_output_weights"] = module.share_embeddings_and_output_weights
    values["position_embedding_type"] = module.position_embedding_type
    values["params_dtype"] = _one({plain(p.dtype) for p in module.parameters()})
    del values["bf16"]  # a wish of the configuration; what ran is the parameters' dtype
    # scaled-dot-product attention takes its softmax in float32 on every backend
    values["attention_softmax_in_fp32"] = True
    return values | _norms(module) | _attention(module) | _rotary(model) | _routers(model)


def plain(value: Any) -> Any:
    """``value`` as the reader of a saved model section gives it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, functools.partial):
        called = {"function": plain(value.func), "args": list(value.args)}
        return called | {"kwargs": dict(value.keywords)}
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        return f"{getattr(value, '__module__', '')}.{name}".replace("torch._C._nn", FUNCTIONAL)
    return value


FUNCTIONAL = "torch.nn.functional"


def _one(found: set[Any]) -> Any:
    return next(iter(found)) if len(found) == 1 else sorted(found, key=str)


def _norms(module: nn.Module) -> dict[str, Any]:
    norms = [part for part in module.modules() if isinstance(part, TorchNorm)]
    if not norms:
        return {}
    return {
        "layernorm_epsilon": _one({norm.eps for norm in norms}),
        "layernorm_zero_centered_gamma": _one({norm.offset == 1.0 for norm in norms}),
        "normalization": _one({"RMSNorm" if norm.rms else "LayerNorm" for norm in norms}),
    }


def _attention(module: nn.Module) -> dict[str, Any]:
    scales = {part.scale for part in module.modules() if isinstance(part, TorchAttention)}
    names = [name for name, _ in module.named_parameters()]
    normed = any(".q_layernorm." in name for name in names)
    return {"qk_layernorm": normed} | ({"softmax_scale": _one(scales)} if scales else {})


def _rotary(model: LiveModel) -> dict[str, Any]:
    """Base and share of the rotated channels from the frequencies that the model turns by.

    Frequency i is base^(-2i / channels), so the second one tells the base; scaled frequencies do
    not, and the constructor's own value is all there is.
    """
    if model.rotary is None:
        return {}
    inner: Any = model.rotary.inner
    channels = 2 * inner.inv_freq.shape[0]
    module: Any = model.module
    width, share = int(model.config.kv_channels), float(module.rotary_percent)
    values: dict[str, Any] = {
        "rotary_percent": share if int(width * share) == channels else channels / width,
        "rotary_base": module.rotary_base,
        "rope_scaling": bool(module.rotary_scaling),
        "seq_len_interpolation_factor": inner.seq_len_interpolation_factor,
    }
    if channels > 2 and not module.rotary_scaling:
        turned = float(inner.inv_freq[1].double()) ** (-channels / 2)
        # float32 frequencies tell the base to about 1e-6
        if not math.isclose(turned, module.rotary_base, rel_tol=1e-5):
            values["rotary_base"] = turned
    return values


def _routers(model: LiveModel) -> dict[str, Any]:
    if not model.routers:
        return {}
    return {
        "moe_router_topk": _one({int(router.topk) for router in model.routers}),
        "moe_router_score_function": _one({router.score_function for router in model.routers}),
        "moe_router_enable_expert_bias": _one(
            {getattr(router, "expert_bias", None) is not None for router in model.routers}
        ),
    }
