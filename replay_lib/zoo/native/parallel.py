"""The layout to record on, as the command line writes it: the replay's words and ``vpp``."""

from __future__ import annotations

from typing import Any

from replay_lib.engine.layout import Layout
from replay_lib.errors import UsageError
from replay_lib.snapshot.model import Parallel


def parse_parallel(text: str) -> Parallel:
    """From ``tp=2,ep=2`` or ``pp=2,vpp=2``; sizes that are not named are 1, or what ``ep`` needs.

    Raises UsageError that names what it found.
    """
    parts = [part.strip() for part in text.split(",")]
    virtual = [part.partition("=")[2] for part in parts if part.startswith("vpp=")]
    rest = [part for part in parts if not part.startswith("vpp=")]
    layout = Layout.parse(",".join(rest) or "dp=1")
    if not virtual:
        return Parallel(**layout.sizes, vpp=None, etp=1)
    if len(virtual) > 1 or not virtual[0].isdigit() or int(virtual[0]) < 2 or layout.pp < 2:
        raise UsageError(
            f"layout {text!r}: found vpp={','.join(virtual)} with pp={layout.pp}, expected one vpp "
            "of 2 or more with a pp of 2 or more"
        )
    return Parallel(**layout.sizes, vpp=int(virtual[0]), etp=1)


def worker_sizes(parallel: Parallel) -> dict[str, Any]:
    """The layout by the names of AXRL's worker configuration."""
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    return {f"{name}_size": getattr(parallel, name) for name in names}


def model_sizes(parallel: Parallel) -> dict[str, Any]:
    """The layout by the names of Megatron's model configuration."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.tp > 1,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }


def shown(parallel: Parallel) -> str:
    """``pp=2,vpp=2``: the axes that are split, or ``dp=1``."""
    names = ("tp", "pp", "vpp", "cp", "ep", "dp")
    sizes = [(name, getattr(parallel, name) or 1) for name in names]
    return ",".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp=1"
