"""Tokens that stand out, by name: where they are, what they are, and all that is known of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.analysis.signals.summary import Outlier
from replay_lib.analysis.signals.view import View

TOLD = 8  # of each kind
CONTEXT = 8  # tokens

Decode = Callable[[list[int]], str]


@dataclass
class OutlierStage:
    """The tokens with the largest |value| of one kind, over all ranks."""

    kind: str
    decode: Decode | None = None
    found: list[Outlier] = field(default_factory=list)

    def add(self, view: View, value_N: Tensor, *, one_a_row: bool = False) -> None:
        """``value_N`` are values of loss tokens; those that are not finite are left out.

        ``one_a_row``: a row's largest token alone (an advantage is the same on a whole row).
        """
        size_N = value_N.double().abs().where(value_N.isfinite(), -1.0)
        at_N2 = view.loss_BT.nonzero()
        if one_a_row and len(size_N):
            size_N = _first_of_row(view, size_N)
        best = size_N.topk(min(TOLD, len(size_N)))
        for size, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if size > 0.0:
                row, position = (int(i) for i in at_N2[number])
                self.found.append(self._outlier(view, row, position, float(value_N[number])))
        self.found.sort(key=lambda one: -abs(one.value))
        del self.found[TOLD:]

    def _outlier(self, view: View, row: int, position: int, value: float) -> Outlier:
        batch = view.batch
        token = int(batch.labels[row, position])
        before = batch.input_ids[row, max(position + 1 - CONTEXT, 0) : position + 1].tolist()
        names = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
        columns = {name: getattr(batch, name) for name in names}
        return Outlier(
            kind=self.kind,
            dp_rank=view.dp_rank,
            row=row,
            position=position,
            index=int(batch.index[row]),
            trajectory_id=view.trajectory(row),
            token_id=token,
            text=self.decode([token]) if self.decode else None,
            context=self.decode(before) if self.decode else None,
            value=value,
            advantage=_number(batch.advantage[row, position]),
            logprobs={
                name.removesuffix("_logprobs"): _number(column[row, position])
                for name, column in columns.items()
                if column is not None
            },
        )


def _first_of_row(view: View, size_N: Tensor) -> Tensor:
    """-1 wherever another token of the row is larger, or as large and earlier."""
    row_N = view.rows_of_tokens()
    largest_B = torch.full((view.batch.rows,), -1.0, dtype=torch.float64)
    largest_B.scatter_reduce_(0, row_N, size_N, "amax")
    number_N = torch.arange(len(size_N))
    number_N = torch.where(size_N == largest_B[row_N], number_N, len(size_N))
    first_B = torch.full((view.batch.rows,), len(size_N))
    first_B.scatter_reduce_(0, row_N, number_N, "amin")
    return torch.where(first_B[row_N] == torch.arange(len(size_N)), size_N, -1.0)


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
