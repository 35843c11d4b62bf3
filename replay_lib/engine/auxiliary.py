"""How much a router's auxiliary losses weigh on a layout other than the recorded one.

With losses a token, Megatron multiplies a router's auxiliary loss by the tokens of that router's
own piece. Summed over the ``tp * cp`` pieces, that is the whole loss times ``N / (tp * cp)``; and
the trainer counts its denominators once a context-parallel rank. So a step recorded with
``tp * cp * cp`` at 4 has a quarter of the auxiliary gradient of the same step on one rank. Read in
Megatron-Core (``router.attach_and_log_load_balancing_loss``, ``apply_z_loss``) and in AXRL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from replay_lib.engine.layout import Layout
from replay_lib.snapshot.model import Parallel


def auxiliary_scale(layout: Layout, recorded: Parallel) -> float:
    """Factor that gives auxiliary losses on ``layout`` the weight that they had in the run."""
    return layout.shards / (recorded.tp * recorded.cp * recorded.cp)


@contextlib.contextmanager
def auxiliary_losses(scale: float) -> Iterator[None]:
    """Weigh auxiliary losses by ``scale`` in the backward passes of the block."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    if scale == 1.0:
        yield
        return
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale)
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = before
