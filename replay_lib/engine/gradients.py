"""Gradients of one experiment: accumulated in float32, measured in float64, and digested."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from replay_lib.engine.comm import Comm
from replay_lib.engine.groups import Groups
from replay_lib.engine.sharing import ordered_parameters, sum_over_ranks

#: Words of the digest's multiplier table; gradients are hashed in blocks of this many pairs.
_BLOCK = 1 << 20


class GradientBuffers:
    """One float32 buffer a parameter, all in one flat tensor, in the order of ``shapes``.

    Megatron accumulates the same way: each micro-batch's gradient, in the parameter's dtype, is
    added to a float32 main gradient.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        total = sum(p.numel() for p in parameters.values())
        device = next(iter(parameters.values())).device
        even = total + total % 2  # the digest reads pairs; what is added stays zero
        self.flat = torch.zeros(even, dtype=torch.float32, device=device)
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, parameter in parameters.items():
            view = self.flat[start : start + parameter.numel()]
            self.views[name] = view.view(parameter.shape)
            start += parameter.numel()

    def scale(self, factor: float) -> None:
        """Multiply every gradient by ``factor`` (one over the summed denominators)."""
        self.flat.mul_(factor)


class GradientCollector:
    """Adds each parameter's gradient to all buffers that are current, as soon as it is ready."""

    def __init__(self, module: nn.Module, groups: Groups | None = None) -> None:
        self.groups = groups or Groups()
        self.parameters = ordered_parameters(module, self.groups)
        self.current: Sequence[GradientBuffers] = ()
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert self.current and parameter.grad is not None
            for buffers in self.current:
                buffers.views[name].add_(parameter.grad)
            parameter.grad = None

        return collect

    def new_buffers(self) -> GradientBuffers:
        """Zeroed buffers for one experiment."""
        return GradientBuffers(self.parameters)

    def sum_over_ranks(self, buffers: GradientBuffers) -> None:
        """Sum a finished gradient over the ranks that share parameters, in place."""
        sum_over_ranks(buffers.flat, buffers.views, self.parameters, self.groups)


@dataclass(frozen=True)
class Measured:
    """Norm, per-parameter norms (L2, before clipping, float64 sums) and digest of a gradient."""

    norm: float
    param_norms: dict[str, float]
    digest: str
    nonfinite: tuple[str, ...]


def measure(
    buffers: GradientBuffers,
    names: Mapping[str, str],
    comm: Comm | None = None,
    counted: Collection[str] | None = None,
) -> Measured:
    """Measure a finished gradient; ``names`` maps module names to the names that are reported.

    Each parameter counts once: tied weights are one parameter, experts are separate rows of one.
    With several ranks (``comm``) each gives the parameters that it has ``counted``, every rank gets
    the figures of the whole gradient, and the digest is that of all ranks' digests in order: equal
    for bit-equal gradients on one layout.
    """
    # one fused kernel: a float64 copy of each gradient would cost five times its own size
    each = torch._foreach_norm(list(buffers.views.values()), dtype=torch.float64)
    squares = torch.stack(each).square().tolist()
    mine = [
        (names.get(own, own), square)
        for own, square in zip(buffers.views, squares, strict=True)
        if counted is None or own in counted
    ]
    print_of_all = digest(buffers)
    if comm is not None and comm.world > 1:
        told = comm.gather((mine, print_of_all))
        mine = [pair for pairs, _ in told for pair in pairs]
        print_of_all = hashlib.sha256(",".join(d for _, d in told).encode()).hexdigest()
    by_name: dict[str, float] = {}
    for shown, square in mine:
        by_name[shown] = by_name.get(shown, 0.0) + square
    norms = {name: square**0.5 for name, square in by_name.items()}
    bad = tuple(name for name, norm in norms.items() if not norm < float("inf"))
    total = sum(square for _, square in mine)
    return Measured(norm=total**0.5, param_norms=norms, digest=print_of_all, nonfinite=bad)


def digest(buffers: GradientBuffers) -> str:
    """A fingerprint of every bit of the gradient, equal only for bit-equal gradients.

    Pairs of float32 are read as 64-bit integers, multiplied by a fixed table of odd 64-bit numbers
    and summed modulo 2**64 in blocks: integer sums do not depend on their order, so the fingerprint
    is the same on every device. The block sums and the parameters' names and shapes go through
    SHA-256. (Hashing gigabytes on the host would cost more than the replay.)
    """
    outer = hashlib.sha256()
    for name, view in buffers.views.items():
        outer.update(f"{name}{tuple(view.shape)};".encode())
    outer.update(_block_sums(buffers.flat.view(torch.int64)))
    return outer.hexdigest()


def fingerprint(tensor: Tensor) -> str:
    """The same of one tensor of any dtype, its dtype and shape included."""
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    even = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])  # 64-bit words want whole bytes of 8
    outer = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
    outer.update(_block_sums(even.view(torch.int64)))
    return outer.hexdigest()


def _block_sums(bits: Tensor) -> bytes:
    """Sums of int64 words times the table, a block each, as text."""
    table = _table(bits.device)
    whole = bits.numel() // _BLOCK * _BLOCK
    sums: list[Tensor] = []
    for start in range(0, whole, 64 * _BLOCK):  # bounds the temporary to 0.5 GB
        block = bits[start : min(start + 64 * _BLOCK, whole)].view(-1, _BLOCK)
        sums.append((block * table).sum(dim=1))
    rest = bits[whole:]
    sums.append((rest * table[: rest.numel()]).sum().reshape(1))
    return ",".join(map(str, torch.cat(sums).tolist())).encode()


def _table(device: torch.device) -> Tensor:
    """Odd multipliers: splitmix64 of the position (Steele et al. 2014), modulo 2**64."""
    if device not in _TABLES:
        x = torch.arange(_BLOCK, dtype=torch.int64) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
        _TABLES[device] = (x | 1).to(device)
    return _TABLES[device]


_TABLES: dict[torch.device, Tensor] = {}
