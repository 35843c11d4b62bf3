"""Whether this machine has what a case needs. Asks the driver; imports no torch."""

from __future__ import annotations

import subprocess

import psutil

from replay_lib.case import Needs
from replay_lib.engine.session import cuda_devices

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


def unmet(needs: Needs, device: str) -> str | None:
    """Why a case with ``needs`` cannot run on ``device`` (auto, cpu or cuda) here; None if it can.

    ``auto`` is cuda where a device is found.
    """
    found = cuda_devices()
    if device == "auto":
        device = "cuda" if found else "cpu"
    if needs.device == "cuda" and device == "cpu":
        return "it needs an NVIDIA device and is to run on the CPU"
    if device == "cuda" and found < needs.devices:
        return f"it needs {needs.devices} NVIDIA device(s), {found} found"
    have = memory_gib(device)
    if needs.memory_gib is not None and have is not None and not have >= needs.memory_gib:
        return f"it needs {needs.memory_gib:g} GiB of memory on {device}, {have:.1f} found"
    return None
