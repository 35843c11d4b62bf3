"""The two configurations of a snapshot: the worker's by AXRL's names, the model's as YAML."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from replay_lib.snapshot.model import Parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How the loop computes a step, as far as a replay has to do the same.

    ``micro_batch_size``: rows of a rank in one forward, consecutive slices of the batch. With
    ``dynamic`` rows are spread as AXRL does it, at most ``micro_batch_size * seq_length`` tokens a
    micro-batch. Gradients are sums over micro-batches and data-parallel ranks, divided once by the
    summed denominators of the loss. ``routing_replay``: recorded routes were forced.
    """

    micro_batch_size: int
    seq_length: int
    dynamic: bool = False
    routing_replay: bool = False
    routing_replay_loss_tokens_only: bool = False
    clip_grad: float = 1.0
    model_name: str = ""
    seed: int = 0


def worker_config(
    step: StepSettings, parallel: Parallel, fields: Mapping[str, Any], global_rows: int | None
) -> dict[str, Any]:
    """What AXRL's worker would have been configured with for this job.

    ``fields`` are the model's, plain values; ``global_rows`` the rows over all ranks, if known.
    """
    sizes = {f"{name}_size": getattr(parallel, name) for name in _AXES}
    return {
        "model": {"name": step.model_name, "seq_length": step.seq_length},
        "model_role": "actor",
        "seed": step.seed,
        **sizes,
        "train_micro_batch_size": step.micro_batch_size,
        "use_dynamic_batch_size": step.dynamic,
        **({} if global_rows is None else {"global_batch_size": global_rows}),
        "enable_routing_replay": step.routing_replay,
        "replay_routing_for_loss_tokens_only": step.routing_replay_loss_tokens_only,
        "bf16": bool(fields.get("bf16")),
        "fp16": bool(fields.get("fp16")),
        "fp8": fields.get("fp8"),
        "moe_aux_loss_coeff": fields.get("moe_aux_loss_coeff") or 0.0,
        "moe_router_load_balancing_type": fields.get("moe_router_load_balancing_type") or "none",
        "deterministic_mode": bool(fields.get("deterministic_mode")),
        "optimizer": {"clip_grad": step.clip_grad},
    }


_AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


def run_config(fields: Mapping[str, Any]) -> str:
    """Megatron-Bridge's YAML with the model's fields; objects become names, never code."""
    import yaml

    model = {name: _plain(value) for name, value in fields.items() if _sayable(value)}
    target = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    document = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "checkpoint": None,
        "dataset": None,
        "model": {"_target_": target, **model},
        "scheduler": None,
        "tokenizer": None,
    }
    return str(yaml.safe_dump(document, sort_keys=True))


def _sayable(value: Any) -> bool:
    """Whether a value can be told in a document: partial functions and live objects cannot."""
    if value is None or isinstance(value, bool | int | float | str | enum.Enum):
        return True
    if isinstance(value, list | tuple):
        return all(map(_sayable, value))
    return _dotted(value) is not None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value.value, int | str):
            return {"_args_": [value.value], "_call_": True, "_name_": value.name, "_target_": name}
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"_call_": False, "_target_": _dotted(value)}


def _dotted(value: Any) -> str | None:
    """The dotted name of a dtype, function or class."""
    text = repr(value)
    if text.startswith("torch.") and type(value).__name__ == "dtype":
        return text
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    named = module and name and callable(value) and "<" not in name
    return f"{module}.{name}" if named else None
