"""The cosine of a gradient to the unpatched one of the same session."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.engine.comm import Comm
from replay_lib.engine.gradients import GradientBuffers, Measured

#: Elements widened to float64 at a time: 32 MB, which stays in a large cache.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Unpatched:
    """The baseline's finished gradient: this rank's parameters by module name, and its norm.

    Tensors are float32, as gradients are summed, on the model's device or in host memory.
    """

    views: Mapping[str, Tensor]
    norm: float

    @classmethod
    def keep(cls, buffers: GradientBuffers, norm: float, device: torch.device) -> Unpatched:
        """``buffers`` themselves where they lie on ``device`` already, else a copy there."""
        return cls({name: view.to(device) for name, view in buffers.views.items()}, norm)


def cosine_to(
    unpatched: Unpatched,
    buffers: GradientBuffers,
    measured: Measured,
    comm: Comm,
    counted: Collection[str] | None = None,
) -> float | None:
    """<g, g0> / (|g| |g0|) over all parameters of all ranks, each counted once, -1 to 1.

    g is in ``buffers``, summed over the ranks and ``measured``; g0 is ``unpatched``. Products of
    float32 values are exact in float64, and so they are summed. ``counted`` are the parameters
    that this rank gives (None: all). None where a norm is zero or not finite: no angle exists.
    """
    lengths = (measured.norm, unpatched.norm)
    if not all(math.isfinite(norm) and norm > 0 for norm in lengths):
        return None
    mine = [
        _dot(view, unpatched.views[name])
        for name, view in buffers.views.items()
        if counted is None or name in counted
    ]
    (total,) = comm.sums([float(torch.stack(mine).sum()) if mine else 0.0])
    # bit-equal gradients give 1 up to the last bit of two square roots
    return max(-1.0, min(1.0, total / lengths[0] / lengths[1]))


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """The scalar product in float64, on the device of ``one``."""
    total = torch.zeros((), dtype=torch.float64, device=one.device)
    pairs = zip(one.reshape(-1).split(_BLOCK), other.reshape(-1).split(_BLOCK), strict=True)
    for left, right in pairs:
        total += left.double().mul_(right.to(one.device)).sum()
    return total
