"""A plain pipeline: one micro-batch at a time through all stages, and back.

Nothing overlaps. What crosses from stage to stage are activations forward and their gradients
backward; the last stage's log-probabilities go to all stages, so that every rank computes the same
loss. Each stage keeps its own piece of the graph, and may be sent backward more than once.

Legend: n packed tokens of a rank's model, R context-parallel ranks, N = n * R, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from replay_lib.engine.attention_ranks import gather_parts
from replay_lib.engine.groups import Groups


@dataclass(frozen=True)
class Stage:
    """What one rank kept of a micro-batch: its outputs, and the activation that it started from.

    Outputs are packed log-probabilities and entropies ``[n]`` on the last stage, the activation
    ``[n / tp, 1, H]`` on others. ``entry`` is None on the first stage.
    """

    outputs: tuple[Tensor, ...]
    entry: Tensor | None

    def gradient(self, groups: Groups) -> Tensor:
        """The gradient of this stage's activation, from the next stage."""
        return _receive(torch.empty_like(self.outputs[0]), groups, groups.pp.rank + 1)

    def send_back(self, groups: Groups) -> None:
        """Hand the gradient of ``entry`` to the stage before, if there is one."""
        if self.entry is None:
            return
        assert self.entry.grad is not None
        _send(self.entry.grad, groups, groups.pp.rank - 1)
        self.entry.grad = None


def receive_activation(model: Any, size: int) -> Tensor | None:
    """What the stage before made of ``size`` packed tokens, set as this stage's input."""
    groups: Groups = model.groups
    if groups.first_stage:
        return None
    config = model.config
    kind = torch.float32 if config.fp32_residual_connection else config.params_dtype
    shape = (size // groups.tp.size, 1, config.hidden_size)
    empty = torch.empty(shape, dtype=kind, device=model.device)
    entry = _receive(empty, groups, groups.pp.rank - 1)
    entry.requires_grad_()
    model.module.set_input_tensor(entry)
    return entry


def send_activation(activation: Tensor, groups: Groups) -> None:
    """Hand this stage's activation to the next stage."""
    _send(activation.detach(), groups, groups.pp.rank + 1)


def share_values(
    outputs: Sequence[Tensor], size: int, groups: Groups, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies ``[N]`` of all tokens, on every rank, without a graph.

    ``outputs`` are this rank's own, empty except on the last stage.
    """
    if outputs:
        both = torch.stack([x.detach() for x in outputs], dim=1)
        if groups.cp.size > 1:
            both = gather_parts(both, groups.cp)
    else:
        both = torch.empty(size * groups.cp.size, 2, dtype=torch.float32, device=device)
    if groups.pp.size > 1:
        last = groups.pp.global_rank(groups.pp.size - 1)
        dist.broadcast(both, src=last, group=groups.pp.group)
    log_prob, entropy = both.unbind(dim=1)
    return log_prob, entropy


def _send(tensor: Tensor, groups: Groups, stage: int) -> None:
    dist.send(tensor.contiguous(), dst=groups.pp.global_rank(stage), group=groups.pp.group)


def _receive(into: Tensor, groups: Groups, stage: int) -> Tensor:
    dist.recv(into, src=groups.pp.global_rank(stage), group=groups.pp.group)
    return into
