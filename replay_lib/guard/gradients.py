"""How two gradients of one experiment differ where their norms do not tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from replay_lib.engine.protocol import Engine, Experiment

#: |tested - reference| / |reference| that arithmetic alone may give, by the dtype of the replay.
#: float32: another order of summation moved single parameters by up to 1e-5 of their norm
#: (benchmarks/results/layouts-cpu.json); ten times that. bfloat16: one rounding is up to 4e-3 of a
#: value, independent from element to element, and a step has tens of them in a row.
DISTANCE = {"float32": 1e-4, "bfloat16": 5e-2}


@runtime_checkable
class GivesGradients(Protocol):
    """An engine that can write an experiment's whole gradient to a file."""

    def save_gradients(self, experiment: Experiment, path: Path) -> None:
        """See :meth:`replay_lib.engine.session.ReplaySession.save_gradients`."""
        ...


@dataclass(frozen=True)
class Difference:
    """Two whole gradients a and b (float32, sums in float64), b the reference's.

    ``cosine`` is a.b / (|a| |b|), None where one of them is zero or not finite; ``scale`` is
    |a| / |b|, ``distance`` |a - b| / |b|, both infinite for a reference of zero.
    """

    cosine: float | None
    scale: float
    distance: float

    @property
    def residue(self) -> float:
        """|a/|a| - (+/-) b/|b||: what is left of the difference but a factor."""
        if self.cosine is None:
            return math.inf
        return math.sqrt(max(0.0, 2.0 - 2.0 * abs(self.cosine)))

    def describe(self, bound: float) -> str | None:
        """The difference in words; None where arithmetic explains it (``distance <= bound``)."""
        if self.distance <= bound:
            return None
        if self.scale == 0:
            return "the gradient vanished"
        if self.cosine is None:
            return "the gradients cannot be compared: one is zero or not finite"
        told = f"cosine {self.cosine:.6f} to the reference's"
        if self.residue <= bound and self.cosine < 0:
            return f"the gradient is reversed, x {-self.scale:.6g} ({told})"
        if self.residue <= bound:
            return (
                f"the gradient is scaled by {self.scale:.6g}, its direction kept ({told}): a "
                "denominator, an aggregation or a factor of the loss"
            )
        return f"the gradient turned: {told}, off by {self.distance:.3g} of its norm"


def save_gradients(engine: Engine, experiments: Sequence[Experiment], home: Path) -> list[Path]:
    """The whole gradient of each of ``experiments`` in a file of its own (4 bytes a parameter)."""
    assert isinstance(engine, GivesGradients), "only the native engine gives whole gradients"
    paths = []
    for experiment in experiments:
        paths.append(home / f"{len(list(home.iterdir()))}.pt")
        engine.save_gradients(experiment, paths[-1])
    return paths


def difference(tested: Path, reference: Path) -> Difference:
    """Of two files that :meth:`ReplaySession.save_gradients` wrote, read one tensor at a time."""
    import torch

    mine, theirs = (
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for path in (tested, reference)
    )
    assert set(mine) == set(theirs), "two trainers replay one model"
    product = mine_2 = theirs_2 = apart_2 = 0.0
    for name, other in theirs.items():
        a, b = mine[name].flatten().double(), other.flatten().double()
        product += float(a @ b)
        mine_2 += float(a @ a)
        theirs_2 += float(b @ b)
        apart_2 += float((a - b) @ (a - b))
    return from_products(product, mine_2, theirs_2, apart_2)


def from_products(product: float, mine_2: float, theirs_2: float, apart_2: float) -> Difference:
    """A difference out of a.b, |a|^2, |b|^2 and |a - b|^2."""
    if not all(map(math.isfinite, (product, mine_2, theirs_2, apart_2))):
        return Difference(None, math.nan, math.nan)
    if theirs_2 == 0:
        same = mine_2 == 0
        return Difference(None, 1.0 if same else math.inf, 0.0 if same else math.inf)
    cosine = product / math.sqrt(mine_2 * theirs_2) if mine_2 > 0 else None
    return Difference(cosine, math.sqrt(mine_2 / theirs_2), math.sqrt(apart_2 / theirs_2))
