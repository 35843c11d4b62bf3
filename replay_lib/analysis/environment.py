"""What this machine has, and which ways to replay would run on it. Imports no torch."""

from __future__ import annotations

import os
import platform
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import psutil

from replay_lib.backend.missing import missing_for_backend
from replay_lib.engine.machine import cuda_devices

GIB = 1 << 30
PACKAGES = (
    "axrl-spike-replay",
    "torch",
    "megatron-core",
    "numpy",
    "pytest",
    "transformer-engine",
    "megatron-bridge",
    "tensordict",
    "ray",
    "axrl",
)


def describe_environment() -> dict[str, Any]:
    """Versions, devices, memory, and for each way to replay what it lacks here."""
    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(memory.total / GIB, 1),
        "memory_free_gib": round(memory.available / GIB, 1),
        "cuda_devices": cuda_devices(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": {name: {"lacks": lacks, "runs": not lacks} for name, lacks in _lacks().items()},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _lacks() -> dict[str, list[str]]:
    """``native``: this library's engine. ``te``: its layers by Transformer Engine. ``axrl``: the
    installed trainer's own replay."""
    gpu = [] if cuda_devices() else ["an NVIDIA device"]
    return {
        "native": _absent("torch", "megatron.core"),
        "te": [*_absent("torch", "megatron.core", "transformer_engine"), *gpu],
        "axrl": missing_for_backend(),
    }


def _absent(*modules: str) -> list[str]:
    return [name for name in modules if not _installed(name)]


def _installed(module: str) -> bool:
    """Whether a module could be imported; parents are looked for one by one, nothing is run."""
    parent, _, last = module.rpartition(".")
    if not parent:
        return find_spec(module) is not None
    spec = find_spec(parent)
    places = spec.submodule_search_locations if spec is not None else None
    return bool(places) and any(
        PathFinder.find_spec(last, [place]) is not None for place in places or ()
    )
