"""One training step on a parallel layout, by Megatron-Core's own machinery, recorded as a snapshot.

The replay is compared with what comes out of here, so nothing of the replay's forward, backward,
token exchange or reduction is used: rotary angles, routers, dispatchers, experts, pipeline
schedules, gradient buffers, their finalisation, the gradient norm and the checkpoint are
Megatron's. Ours are the packing of rows, the norms and the attention kernel (Transformer Engine's
in production) and the loss. Needs no torch on import.
"""

from replay_lib.zoo.native.launch import LayoutStep, record_steps
from replay_lib.zoo.native.parallel import parse_parallel

__all__ = ["LayoutStep", "parse_parallel", "record_steps"]
