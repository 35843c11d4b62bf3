"""Moments, quantiles and histograms of values that come in pieces, in bounded memory.

Up to :data:`EXACT` values are kept and quantiles are values of the data. Beyond that each value is
counted in a bin of all numbers that share the first 20 bits of a float32 (sign, exponent, 11 bits
of the mantissa): 8 MB a stream, whatever comes. A bin's middle is within :data:`ERROR` of every
value in it. Neither depends on how the values were cut into pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.analysis.signals.figures import QUANTILES, Distribution, Histogram

EXACT = 1 << 20
ERROR = 2.0**-12  # half of a bin's width, 2**-11 of the value
_DROPPED = 12  # bits of a float32's 32
_BINS = 1 << (32 - _DROPPED)
_SMALLEST = 2.0**-126  # below it float32 is denormal: told as 0


@dataclass
class Stream:
    """Finite values are summed in float64 (Chan's update); the others are counted alone."""

    count: int = 0
    nonfinite: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean
    minimum: float = math.inf
    maximum: float = -math.inf
    kept: list[Tensor] = field(default_factory=list)
    bins: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Count ``values`` (any shape, any real dtype)."""
        finite = self.moments(values)
        if not len(finite):
            return
        self.kept.append(finite)
        if self.bins is not None or self.count > EXACT:
            self._fold()

    def moments(self, values: Tensor) -> Tensor:
        """Count ``values`` for mean, deviation and extremes alone; the finite ones in float64."""
        flat = values.detach().flatten().double()
        finite = flat[flat.isfinite()]
        self.nonfinite += len(flat) - len(finite)
        if len(finite):
            self._update(finite)
        return finite

    def _update(self, finite: Tensor) -> None:
        mean, count = float(finite.mean()), len(finite)
        squares = float((finite - mean).square().sum())
        whole, apart = self.count + count, mean - self.mean
        self.mean += apart * count / whole
        self.squares += squares + apart * apart * self.count * count / whole
        self.count = whole
        self.minimum = min(self.minimum, float(finite.min()))
        self.maximum = max(self.maximum, float(finite.max()))

    def _fold(self) -> None:
        if self.bins is None:
            self.bins = torch.zeros(_BINS, dtype=torch.int64)
        for values in self.kept:
            self.bins += torch.bincount(_bin_of(values), minlength=_BINS)
        self.kept.clear()

    def distribution(self) -> Distribution:
        """What is known of the values so far."""
        if not self.count:
            return Distribution(count=0, nonfinite=self.nonfinite)
        return Distribution(
            count=self.count,
            nonfinite=self.nonfinite,
            mean=self.mean,
            std=math.sqrt(self.squares / self.count),
            minimum=self.minimum,
            maximum=self.maximum,
            quantiles=tuple(self._quantiles()),
            error=0.0 if self.bins is None else ERROR,
        )

    def _quantiles(self) -> list[float]:
        ranks = [max(math.ceil(share * self.count), 1) for share in QUANTILES]
        if self.bins is None:
            ordered = torch.cat(self.kept).sort().values
            return [float(ordered[rank - 1]) for rank in ranks]
        places = torch.searchsorted(self.bins.cumsum(0), torch.tensor(ranks))
        middles = [_middle(int(place)) for place in places]
        inside = [min(max(m, self.minimum), self.maximum) for m in middles]
        return [self.minimum, *inside[1:-1], self.maximum]


def _bin_of(values: Tensor) -> Tensor:
    """Numbers in order to bins in order: a negative float's bits count downwards."""
    bits = values.float().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered >> _DROPPED).long() + _BINS // 2


def _middle(place: int) -> float:
    low = (place - _BINS // 2) << _DROPPED
    ordered = torch.tensor([low + (1 << (_DROPPED - 1))], dtype=torch.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    value = float(bits.view(torch.float32))
    return value if abs(value) >= _SMALLEST else 0.0


@dataclass
class Bins:
    """Counts between ``edges``, ascending; see :class:`Histogram`."""

    edges: Sequence[float]
    counts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.counts = torch.zeros(len(self.edges) + 1, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Count the finite ones among ``values``."""
        flat = values.detach().flatten().double()
        flat = flat[flat.isfinite()]
        edges = torch.tensor(self.edges, dtype=torch.float64)
        place = torch.searchsorted(edges, flat, right=True)
        place[flat == edges[-1]] -= 1  # the last bin has its upper edge
        self.counts += torch.bincount(place, minlength=len(self.counts))

    def histogram(self) -> Histogram:
        """The counts so far."""
        below, *inside, above = (int(n) for n in self.counts.tolist())
        return Histogram(edges=tuple(self.edges), counts=tuple(inside), below=below, above=above)
