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


def cuda_devices() -> int:
    """NVIDIA devices that a worker would see; asks the driver's device files, imports no torch."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(
        present, len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    )


def has_cuda() -> bool:
    """Whether a worker would see an NVIDIA device."""
    return cuda_devices() > 0
