"""Tokens a row: all, of the prompt, of the loss; turns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.analysis.signals.stream import Bins, Stream
from replay_lib.analysis.signals.summary import Lengths, RowPlace
from replay_lib.analysis.signals.view import View

EDGES = (0.0, *(2.0**k for k in range(25)))
#: Turn indexes that are told one by one, the smallest first.
TURNS_TOLD = 64


@dataclass
class LengthStage:
    """``loss_rows`` are all rows that train, with their loss tokens."""

    rows: int = 0
    padding: int = 0
    idle: int = 0
    tokens: Stream = field(default_factory=Stream)
    loss: Stream = field(default_factory=Stream)
    prompt: Stream = field(default_factory=Stream)
    spans: Stream = field(default_factory=Stream)
    turns: Stream | None = None
    bins: Bins = field(default_factory=lambda: Bins(EDGES))
    turn_tokens: Counter[int] = field(default_factory=Counter)
    loss_rows: list[RowPlace] = field(default_factory=list)

    def add(self, view: View) -> None:
        """Take in one rank."""
        count_B = view.loss_BT.sum(dim=1)
        trains_B = count_B > 0
        self.rows += int(view.real_B.sum())
        self.padding += int((~view.real_B).sum())
        self.idle += int((view.real_B & ~trains_B).sum())
        self.tokens.add(view.batch.attention_mask.sum(dim=1)[view.real_B])
        self.loss.add(count_B[trains_B])
        self.bins.add(count_B[trains_B])
        self.prompt.add((first_loss(view) + 1)[trains_B])
        before_BT = torch.zeros_like(view.loss_BT)
        before_BT[:, 1:] = view.loss_BT[:, :-1]
        self.spans.add((view.loss_BT & ~before_BT).sum(dim=1)[trains_B])
        self._turns(view, trains_B)
        for row in trains_B.nonzero().flatten().tolist():
            self.loss_rows.append(view.place(row, float(count_B[row])))

    def _turns(self, view: View, trains_B: Tensor) -> None:
        turn_N = view.on_loss("turn_index")
        if turn_N is None:
            return
        self.turns = self.turns or Stream()
        # numbers of turns instead of turns: whatever they are, row and number fit one integer
        turns, number_N, tokens = torch.unique(turn_N, return_inverse=True, return_counts=True)
        pairs = torch.unique(view.rows_of_tokens() * max(len(turns), 1) + number_N)
        rows = pairs.div(max(len(turns), 1), rounding_mode="floor")
        self.turns.add(torch.bincount(rows, minlength=view.batch.rows)[trains_B])
        for turn, count in zip(turns.tolist(), tokens.tolist(), strict=True):
            self.turn_tokens[turn] += count

    def result(self) -> Lengths:
        """All ranks."""
        told = sorted(self.turn_tokens)[:TURNS_TOLD]
        return Lengths(
            rows=self.rows,
            padding_rows=self.padding,
            rows_without_loss=self.idle,
            tokens=self.tokens.distribution(),
            loss_tokens=self.loss.distribution(),
            prompt_tokens=self.prompt.distribution(),
            histogram=self.bins.histogram(),
            spans=self.spans.distribution(),
            turns=None if self.turns is None else self.turns.distribution(),
            turn_tokens={str(turn): self.turn_tokens[turn] for turn in told},
        )


def first_loss(view: View) -> Tensor:
    """The first loss position of each row (0 where there is none), int64 ``[B]``.

    The tokens up to and including it are the prompt: it is the next one that trains.
    """
    return view.loss_BT.int().argmax(dim=1)
