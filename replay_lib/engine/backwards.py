"""Which experiments of one forward need a backward of their own: one question has one answer.

Many methods leave a step's loss as it is, or change it in the same way: what they ask of the
log-probabilities is then equal bit for bit, and so is the gradient that a backward gives. Everybody
asks with zeros that have no sign: a masked token's 0 times a negative advantage is -0.0, which asks
for nothing else than 0.0 and would part those that ask for the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from replay_lib.engine.gradients import GradientBuffers

#: Gradients of log-probabilities and entropies, ``[B, T]`` float32 (None: none is asked for).
Grads = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Asked:
    """What one experiment asks of a micro-batch's backward; ``alone``: it gets one of its own."""

    grads: Grads
    buffers: GradientBuffers
    alone: bool


def without_signs_of_zero(grads: Grads) -> Grads:
    """``grads`` with 0.0 in the place of -0.0; every other value, NaN too, is what it was."""
    asked, entropy = grads
    return asked + 0.0, None if entropy is None else entropy + 0.0


@dataclass
class Backward:
    """One backward, and everybody whose gradient it is."""

    grads: Grads
    buffers: list[GradientBuffers] = field(default_factory=list)


def distinct(asked: Iterable[Asked]) -> list[Backward]:
    """One backward for all that ask bit-equal things, in the order of first appearance."""
    found: dict[object, Backward] = {}
    each = [replace(one, grads=without_signs_of_zero(one.grads)) for one in asked]
    # bits are read off the device, which waits for it: only where there are two to compare
    free = [one for one in each if not one.alone]
    bits = iter(_bits([one.grads for one in free]) if len(free) > 1 else [b""] * len(free))
    for number, one in enumerate(each):
        key: object = number if one.alone else next(bits)
        found.setdefault(key, Backward(one.grads)).buffers.append(one.buffers)
    return list(found.values())


def _bits(each: Sequence[Grads]) -> list[tuple[bytes | None, ...]]:
    """What each asks, as bytes: bits, since a NaN equals nothing. One transfer for all of them."""
    tensors = [g.detach() for grads in each for g in grads if g is not None]
    host = iter(torch.stack(tensors).cpu().numpy())
    return [tuple(None if g is None else next(host).tobytes() for g in grads) for grads in each]
