"""Sums of advantages by sign, and whether one row holds most of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from replay_lib.analysis.signals.stream import Stream
from replay_lib.analysis.signals.summary import Advantages, RankAdvantages, RowPlace
from replay_lib.analysis.signals.view import View

#: |advantage| at or under this is near zero; balance-negative-advantages takes the same.
EPS = 1e-6


@dataclass
class AdvantageStage:
    """``rows`` are the rows with the largest |advantage| of a token, the largest first."""

    ranks: list[RankAdvantages] = field(default_factory=list)
    values: Stream = field(default_factory=Stream)
    row_sums: list[float] = field(default_factory=list)
    rows: list[RowPlace] = field(default_factory=list)

    def add(self, view: View) -> None:
        """Take in one rank."""
        values = view.batch.advantage[view.loss_BT].double()
        self.values.add(values)
        finite = values.isfinite()
        used, token_rows = values[finite], view.rows_of_tokens()[finite]
        positive, negative = used > EPS, used < -EPS
        self.ranks.append(
            RankAdvantages(
                dp_rank=view.dp_rank,
                tokens=len(used),
                positive=float(used[positive].sum()),
                negative=-float(used[negative].sum()),
                positive_tokens=int(positive.sum()),
                negative_tokens=int(negative.sum()),
                near_zero=int((used.abs() <= EPS).sum()),
            )
        )
        sums = torch.zeros(view.batch.rows, dtype=torch.float64)
        largest = torch.zeros_like(sums)
        sums.index_add_(0, token_rows, used.abs())
        largest.scatter_reduce_(0, token_rows, used.abs(), "amax")
        self.row_sums += sums.tolist()
        self.rows += [view.place(row, float(largest[row])) for row in largest.nonzero().flatten()]
        self.rows.sort(key=lambda place: -place.value)

    def result(self) -> Advantages:
        """All ranks."""
        total = RankAdvantages(
            dp_rank=None,
            tokens=sum(r.tokens for r in self.ranks),
            positive=sum(r.positive for r in self.ranks),
            negative=sum(r.negative for r in self.ranks),
            positive_tokens=sum(r.positive_tokens for r in self.ranks),
            negative_tokens=sum(r.negative_tokens for r in self.ranks),
            near_zero=sum(r.near_zero for r in self.ranks),
        )
        whole = sum(self.row_sums)
        return Advantages(
            eps=EPS,
            total=total,
            ranks=tuple(self.ranks),
            balance=total.positive / total.negative if total.negative > 0 else None,
            largest_row_share=max(self.row_sums) / whole if whole > 0 else None,
            values=self.values.distribution(),
        )
