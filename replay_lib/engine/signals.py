"""What the loss asked of each token, kept to tell how much of it a mitigation keeps.

Per recorded data-parallel rank, ``[B, T]`` on the CPU: ``keep`` (share of the token that survives
all filters and weights, 0 to 1), ``advantage`` (advantage times policy weight) and ``dloss``
(dLoss/dlogprob, divided by the summed denominators at the end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.comm import Comm
from replay_lib.engine.protocol import Retained
from replay_lib.loss import GrpoSettings

KINDS = ("keep", "advantage", "dloss")


@dataclass(frozen=True)
class Signals:
    """Signals of one experiment on the ranks that this process replays."""

    keep: tuple[Tensor, ...]
    advantage: tuple[Tensor, ...]
    dloss: tuple[Tensor, ...]
    waiting: list[tuple[int, list[int], Tensor]] = field(default_factory=list)

    @classmethod
    def empty(cls, batches: Sequence[RankBatch]) -> Signals:
        """Zeros for every row of every rank."""

        def zeros() -> tuple[Tensor, ...]:
            return tuple(torch.zeros(b.input_ids.shape) for b in batches)

        return cls(zeros(), zeros(), zeros())

    def put(
        self, rank: int, rows: Sequence[int], keep: Tensor, advantage: Tensor, dloss: Tensor
    ) -> None:
        """Take one micro-batch's values; :meth:`settle` stores them.

        They stay on their device till then: to fetch them at once would have it wait, once a
        micro-batch and experiment.
        """
        values = torch.stack([value.detach().float() for value in (keep, advantage, dloss)])
        self.waiting.append((rank, list(rows), values))

    def settle(self) -> None:
        """Store everything that was taken."""
        for rank, rows, values in self.waiting:
            for kind, value in zip(KINDS, values.cpu(), strict=True):
                getattr(self, kind)[rank][rows] = value
        self.waiting.clear()

    def scale(self, factor: float) -> None:
        """Divide by the summed denominators (``factor`` is one over them)."""
        for value in self.dloss:
            value.mul_(factor)


def retained(reference: Signals, signals: Signals, comm: Comm) -> Retained:
    """Shares of ``reference`` that ``signals`` keep: sum of min(|c'|, |c|) over sum of |c|."""
    sums: list[float] = []
    for kind in KINDS:
        pairs = list(zip(getattr(reference, kind), getattr(signals, kind), strict=True))
        kept = sum(float(torch.minimum(c.abs(), d.abs()).double().sum()) for c, d in pairs)
        sums += [kept, sum(float(c.abs().double().sum()) for c, _ in pairs)]
    sums = comm.sums_of_batches(sums)
    shares = [
        kept / whole if whole > 0 else float("nan")
        for kept, whole in zip(sums[::2], sums[1::2], strict=True)
    ]
    return Retained(tokens=shares[0], advantage=shares[1], dloss_dlogprob=shares[2])


def first_nonfinite(signals: Signals, batches: Sequence[RankBatch]) -> tuple[str, ...]:
    """Name the first token of each rank whose dLoss/dlogprob is not finite."""
    found: list[str] = []
    for batch, values in zip(batches, signals.dloss, strict=True):
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            row, token = (int(x) for x in bad[0])
            found.append(
                f"dLoss/dlogprob of dp rank {batch.dp_rank} row {row} token {token} "
                f"({len(bad)} tokens of that rank)"
            )
    return tuple(found)


def loss_note(rows: RankBatch, numbers: Sequence[int], value: float, settings: GrpoSettings) -> str:
    """Tell of a micro-batch (rows ``numbers`` of its rank) whose loss is not finite, and why."""
    place = f"the loss of dp rank {rows.dp_rank}, rows {list(numbers)}, is {value}"
    if bool(rows.loss_mask.any()):
        return place
    return (
        f"{place}: the micro-batch has no loss token, and {settings.loss_agg_type} of nothing "
        "times a denominator of 0 is no number; the trainer's is the same, its gradient is zero"
    )
