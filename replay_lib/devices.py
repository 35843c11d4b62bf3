"""Whether this machine has what a case needs. Asks the driver; imports no torch."""

from __future__ import annotations

from replay_lib.case import Needs
from replay_lib.engine.machine import cuda_devices, memory_gib


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
