"""Columns one by one: their values on loss tokens, and every value that is no number."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.analysis.signals.stream import Stream
from replay_lib.analysis.signals.summary import Column, NonFinite
from replay_lib.analysis.signals.view import View
from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS

#: Told as distributions; advantage has a place of its own.
DESCRIBED = (
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "turn_reward",
    "old_values",
    "returns",
)


@dataclass
class ValueStage:
    """``bad`` is by column; ``dtypes`` are those on disk."""

    streams: dict[str, Stream] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)
    bad: dict[str, NonFinite] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    def add(self, view: View) -> None:
        """Take in one rank."""
        for name in (*TOKEN_COLUMNS, *ROW_COLUMNS):
            values: Tensor | None = getattr(view.batch, name)
            if values is None:
                continue
            self.dtypes[name] = str(values.dtype).removeprefix("torch.")
            if values.is_floating_point():
                self._not_finite(view, name, values)
            if name in DESCRIBED:
                self.streams.setdefault(name, Stream()).add(values[view.loss_BT])

    def _not_finite(self, view: View, name: str, values: Tensor) -> None:
        bad = ~values.isfinite()
        if not bool(bad.any()):
            return
        on_loss = bad & view.loss_BT if bad.ndim == 2 else torch.zeros_like(bad)
        # the first on a loss token if there is one: that is the one that reaches the loss
        at = (on_loss if bool(on_loss.any()) else bad).nonzero()[0].tolist()
        count = int(on_loss.sum())
        before = self.bad.get(name)
        others = int(bad.sum()) - count
        self.elsewhere[name] = self.elsewhere.get(name, 0) + others
        first = before is None or (not before.on_loss_tokens and count > 0)
        named = NonFinite(
            column=name,
            on_loss_tokens=count + (before.on_loss_tokens if before else 0),
            elsewhere=self.elsewhere[name],
            dp_rank=view.dp_rank,
            row=at[0],
            position=at[1] if len(at) > 1 else None,
        )
        if before is not None and not first:
            keep = ("dp_rank", "row", "position")
            named = named.model_copy(update={k: getattr(before, k) for k in keep})
        self.bad[name] = named

    def result(self) -> tuple[Column, ...]:
        """All ranks."""
        return tuple(
            Column(
                name=name,
                values=self.streams[name].distribution(),
                elsewhere=self.elsewhere.get(name, 0),
            )
            for name in DESCRIBED
            if name in self.streams
        )
