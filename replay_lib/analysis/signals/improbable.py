"""Rows that their own policy finds improbable: garbled text, or another model's."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from replay_lib.analysis.signals.summary import RowPlace
from replay_lib.analysis.signals.view import View


@dataclass
class ImprobableStage:
    """``rows``: all that train, with their mean old log-probability over finite loss tokens."""

    known: bool = False
    rows: list[RowPlace] = field(default_factory=list)

    def add(self, view: View) -> None:
        """Take in one rank; without old log-probabilities nothing is known."""
        values = view.on_loss("old_logprobs")
        if values is None:
            return
        self.known = True
        finite = values.isfinite()
        token_rows = view.rows_of_tokens()[finite]
        count_B = torch.bincount(token_rows, minlength=view.batch.rows)
        sum_B = torch.zeros(view.batch.rows, dtype=torch.float64)
        sum_B.index_add_(0, token_rows, values[finite].double())
        for row in count_B.nonzero().flatten().tolist():
            self.rows.append(view.place(row, float(sum_B[row] / count_B[row])))
