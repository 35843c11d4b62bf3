"""What Megatron's training machinery needs on a CPU, beside what every worker needs.

Each replacement has its reason; none is installed where a CUDA device exists. They live in the
recorder's processes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replay_lib.engine import shims

#: Factories that schedules, optimizers and norms call with device="cuda".
FACTORIES = ("tensor", "zeros", "ones", "empty", "full")


def install() -> None:
    """Install them where there is no GPU; before any other import of Megatron."""
    if not shims.install():
        return
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Optimizers and clipping ask for the type string of a CUDA tensor.
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    # gloo takes plain lists where Megatron's dispatcher hands over numpy arrays.
    exchange = torch.distributed.all_to_all_single
    torch.distributed.all_to_all_single = _with_lists(exchange)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return factory(*args, **options)

    return made


def _type_as_on_cuda(kind: Callable[..., Any]) -> Callable[..., Any]:
    def told(self: Tensor, *args: Any, **options: Any) -> Any:
        name = kind(self, *args, **options)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    return told


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def exchanged(
        output: Tensor, given: Tensor, receive: Any = None, send: Any = None, **options: Any
    ) -> Any:
        sizes = (options.pop("output_split_sizes", receive), options.pop("input_split_sizes", send))
        lists = [None if size is None else [int(n) for n in size] for size in sizes]
        return exchange(output, given, *lists, **options)

    return exchanged
