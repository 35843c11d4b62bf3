"""What fits: refuse before loading what cannot, and choose how many experiments share a forward."""

from __future__ import annotations

import resource

import psutil
import torch

from replay_lib.engine.layout import ONE_RANK, Layout
from replay_lib.engine.step import Loaded
from replay_lib.errors import EngineError

#: Experiments of one group each hold a float32 gradient; more than this many gain nothing.
LARGEST_GROUP = 16
#: Share of the free memory that a group's gradients may take; activations need the rest.
GROUP_SHARE = 0.4
#: The unpatched gradient is kept where it takes no more of the free memory than this: each replay
#: needs as much again for its own gradient, and activations are freed before it is asked.
KEEP_SHARE = 0.4


def free_bytes(device: torch.device) -> int:
    """Free memory on ``device``, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held at once, in bytes.

    Of ``device`` what PyTorch had given to tensors (fragments and NCCL's buffers are beside it); on
    a CPU the resident set, PyTorch and Megatron themselves included.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def refuse_what_cannot_fit(needed: int, device: torch.device, layout: Layout = ONE_RANK) -> None:
    """Raise EngineError where ``needed`` bytes a rank are more than ``device`` has free.

    Ranks on a CPU share its memory.
    """
    if device.type == "cpu":
        needed *= layout.ranks
    free = free_bytes(device)
    if needed > free:
        raise EngineError(
            f"the replay needs about {needed / 2**30:.1f} GiB on {device}, {free / 2**30:.1f} GiB "
            "are free; nothing was loaded. Use a larger device or more devices (--layout), or "
            "replay fewer data-parallel ranks with --dp-ranks (a diagnostic, not full-fidelity)."
        )


def group_size(loaded: Loaded) -> int:
    """How many experiments may share one forward, at least 1; the same on every rank."""
    parameters = sum(p.numel() for p in loaded.collector.parameters.values())
    fits = int(GROUP_SHARE * free_bytes(loaded.model.device) / (4 * max(parameters, 1)))
    # A patch of the forward replays twice (stored and carried), hence the halving.
    return int(max(1, min(LARGEST_GROUP, *loaded.comm.gather(fits // 2))))


def place_to_keep(loaded: Loaded) -> torch.device | None:
    """Where one more gradient (float32) fits for a session's life; the same on every rank.

    The model's device, else the host's memory, else None. Ranks on a host share its memory; as
    many as the job has are assumed to be on one.
    """
    needed = 4 * sum(p.numel() for p in loaded.collector.parameters.values())
    host = torch.device("cpu")
    for place in dict.fromkeys((loaded.model.device, host)):
        sharing = loaded.comm.world if place == host else 1
        fits = needed * sharing <= KEEP_SHARE * free_bytes(place)
        if all(loaded.comm.gather(fits)):
            return place
    return None
