"""Every replacement that lets Megatron-Core run where there is no GPU, each with its reason.

Nothing here is installed while a CUDA device exists. All of it lives in the worker process, so
neither pytest nor the command line ever sees a patched torch. Seen necessary with megatron-core
0.16.1 and 0.19.2 on torch 2.13.0's CPU build.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch


class _NullStream:
    """Stands for a CUDA stream or event: work on a CPU is already in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: _NullStream()  # record_event() gives an event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NullStream)

    __hash__ = object.__hash__


@contextlib.contextmanager
def _null_fork(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def install() -> bool:
    """Install what this machine needs; returns whether CPU replacements are in force.

    Must run before any other import of Megatron-Core modules that read ``torch.cuda``.
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        _install_cuda_stand_ins()
    _name_missing_te_gemm()
    return on_cpu


def _install_cuda_stand_ins() -> None:
    # Parameters and buffers are created with device=torch.cuda.current_device().
    _replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # The all-to-all dispatcher makes a side stream for its copy of the expert counts.
    for name in ("Stream", "Event"):
        _replace(torch.cuda, name, _NullStream)
    _replace(torch.cuda, "current_stream", _NullStream)
    _replace(torch.cuda, "stream", _null_fork)
    # Process-group set-up and the dispatcher wait for a device that is not there.
    _replace(torch.cuda, "synchronize", lambda *_a: None)
    # The last pipeline stage moves its copy of a tied embedding to the device when it is built.
    _replace(torch.Tensor, "cuda", lambda tensor, *_a, **_k: tensor)
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    # The tracker forks CUDA generators around dropout and initialisation; the replay uses neither.
    _replace(rng.CudaRNGStatesTracker, "fork", _null_fork)


def _name_missing_te_gemm() -> None:
    # moe_utils reads this name although it binds it only where Transformer Engine is installed
    # (0.16.1); without it the router's float32 gating raises NameError.
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        _replace(moe_utils, "te_general_gemm", None)
