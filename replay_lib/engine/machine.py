"""What this machine has: NVIDIA devices and memory. Asks the driver; imports no torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil

GIB = 1 << 30


def memory_gib(device: str) -> float | None:
    """Memory of one device (cpu: of the machine) in GiB; None where the driver does not tell."""
    if device == "cpu":
        return float(psutil.virtual_memory().total) / GIB
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        return float(told.stdout.split()[0]) / 1024  # told in MiB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def visible_devices() -> tuple[str, ...]:
    """NVIDIA devices that a worker would see, as ``CUDA_VISIBLE_DEVICES`` names them."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(map(str, range(present)))
    listed = [part.strip() for part in named.split(",")]
    return tuple(part for part in listed if part not in ("", "-1"))[:present]


def cuda_devices() -> int:
    """NVIDIA devices that a worker would see; asks the driver's device files, imports no torch."""
    return len(visible_devices())


def has_cuda() -> bool:
    """Whether a worker would see an NVIDIA device."""
    return cuda_devices() > 0
