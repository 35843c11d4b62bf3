"""Whether this machine has what a case needs, and which devices are whose. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from replay_lib.case import Needs
from replay_lib.engine.machine import cuda_devices, memory_gib, visible_devices
from replay_lib.engine.nodes import nodes_hint

#: What pytest-xdist calls its workers: gw0, gw1, ...
XDIST_WORKER = "PYTEST_XDIST_WORKER"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def own_devices(size: int) -> Iterator[None]:
    """Meanwhile this process, and what it starts, sees its own ``size`` devices.

    The devices of a machine are split into sets of that size, and pytest-xdist's workers take the
    sets in turn: more workers than sets share them evenly. Without pytest-xdist, or with fewer
    devices than that, nothing changes.
    """
    worker, visible = os.environ.get(XDIST_WORKER, ""), visible_devices()
    if not worker.removeprefix("gw").isdigit() or len(visible) < 2 * size:
        yield
        return
    number = int(worker.removeprefix("gw")) % (len(visible) // size)
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ",".join(visible[number * size : (number + 1) * size])
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


def unmet(needs: Needs, device: str, nodes: int = 1) -> str | None:
    """Why a case with ``needs`` cannot run on ``device`` (auto, cpu or cuda) here; None if it can.

    ``auto`` is cuda where a device is found. Of ``nodes`` machines that replay together the others
    are taken to be as this one; what they really have is seen when they come.
    """
    found = cuda_devices()
    if device == "auto":
        device = "cuda" if found else "cpu"
    if needs.device == "cuda" and device == "cpu":
        return "it needs an NVIDIA device and is to run on the CPU"
    if device == "cuda" and found * nodes < needs.devices:
        here = "found" if nodes == 1 else f"on this one of {nodes} nodes"
        hint = nodes_hint(needs.devices, found)
        return f"it needs {needs.devices} NVIDIA device(s), {found} {here}{hint}"
    have = memory_gib(device)
    if needs.memory_gib is not None and have is not None and not have >= needs.memory_gib:
        return f"it needs {needs.memory_gib:g} GiB of memory on {device}, {have:.1f} found"
    return None
