"""Which of a micro-batch's packed tokens, and which MoE layers, this rank works on.

N packed tokens are cut into cp equal parts, which the models read. Under tensor parallelism a
part's tokens are shared out once more, into tp equal pieces in order: norms and routers see their
own piece (Megatron's sequence parallelism), attention and output layer see the part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from replay_lib.engine.groups import ALONE, Axis
from replay_lib.engine.model import LiveModel

#: The trainer pads the packed total to this multiple (FP8 kernels want it; AXRL always does it).
ALIGN = 128


@dataclass(frozen=True)
class Part:
    """This rank's share. ``layers`` are its routers' places among all MoE layers (None: all)."""

    context: Axis = ALONE
    tensor: Axis = ALONE
    layers: tuple[int, ...] | None = None

    @property
    def align(self) -> int:
        """N is a multiple of this, so that the cuts come out even."""
        return math.lcm(ALIGN, self.context.size * self.tensor.size)

    def read(self, packed: Tensor) -> Tensor:
        """``[N, ...]`` to what this rank's model reads, ``[N / cp, ...]``."""
        return packed.chunk(self.context.size)[self.context.rank]

    def routed(self, packed: Tensor) -> Tensor:
        """``[N, L, ...]`` to what its routers see: ``[N / (cp * tp), own layers, ...]``."""
        piece = self.read(packed).chunk(self.tensor.size)[self.tensor.rank]
        return piece if self.layers is None else piece[:, list(self.layers)]


WHOLE = Part()


def part_of(model: LiveModel) -> Part:
    """The share of this rank's shard of the model."""
    if model.groups.layout.ranks == 1:
        return WHOLE
    return Part(model.groups.cp, model.groups.tp, model.moe_numbers)
