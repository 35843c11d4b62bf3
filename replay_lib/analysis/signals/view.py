"""One rank as the stages see it: which rows and tokens count. Legend: B rows, T padded width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.analysis.signals.summary import RowPlace
from replay_lib.batch import RankBatch


@dataclass(frozen=True)
class View:
    """``real_B``: rows that are no padding; ``loss_BT``: real tokens of them that train."""

    batch: RankBatch
    real_B: Tensor
    loss_BT: Tensor

    @property
    def dp_rank(self) -> int:
        """The recorded data-parallel rank."""
        return self.batch.dp_rank

    def on_loss(self, name: str) -> Tensor | None:
        """Column ``name`` on loss tokens, row after row, as stored; None where it is absent."""
        values: Tensor | None = getattr(self.batch, name)
        return None if values is None else values[self.loss_BT]

    def rows_of_tokens(self) -> Tensor:
        """The row of each loss token, in the order of :meth:`on_loss`, int64."""
        counts_B = self.loss_BT.sum(dim=1)
        return torch.repeat_interleave(torch.arange(self.batch.rows), counts_B)

    def trajectory(self, row: int) -> int | None:
        """The trajectory's id; None where no column says."""
        ids = self.batch.trajectory_id
        return None if ids is None else int(ids[row])

    def place(self, row: int, value: float) -> RowPlace:
        """Row ``row`` with the figure that it is named for."""
        return RowPlace(
            dp_rank=self.dp_rank,
            row=row,
            index=int(self.batch.index[row]),
            trajectory_id=self.trajectory(row),
            value=value,
        )


def view_of(batch: RankBatch) -> View:
    """Padding rows are those with ``index`` < 0; their tokens are left out."""
    real_B = batch.index >= 0
    return View(batch, real_B, batch.loss_mask & batch.attention_mask & real_B.unsqueeze(1))
