"""One data-parallel rank's batch as tensors with stated shapes.

Legend used everywhere: B batch rows, T tokens (padded width), L layers of the route payload,
K top-k, E experts, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay_lib.errors import BatchError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from replay_lib.merged import MergedRow

TOKEN_COLUMNS = (
    "input_ids",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "advantage",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "turn_index",
    "turn_reward",
    "old_values",
    "returns",
)
ROW_COLUMNS = ("index", "trajectory_id", "reward", "reward_baseline")


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """The batch of one recorded data-parallel rank, on the CPU.

    Token columns are ``[B, T]`` and label-aligned: the value at ``t`` belongs to token ``t + 1``.
    ``attention_mask`` is true for real tokens, contiguous from 0. ``index`` is -1 on padding rows.
    ``routes[b]`` is int16 ``[n_b - 1, L, K]`` for a row of ``n_b`` real tokens (row ``i`` holds the
    experts used when token ``i`` was processed), or None where the row has no routes; int8 or uint8
    where the trainer stored those. ``merge_info[b]`` is set only on rows that are prefix trees;
    such a row has no ``routes`` of its own but those of its paths.
    """

    dp_rank: int
    index: Tensor  # int64 [B]
    input_ids: Tensor  # int64 [B, T]
    labels: Tensor  # int64 [B, T], -100 where not trainable
    loss_mask: Tensor  # bool [B, T]
    attention_mask: Tensor  # bool [B, T]
    advantage: Tensor  # float32 [B, T]
    old_logprobs: Tensor | None = None  # float32 [B, T], natural log
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    position_ids: Tensor | None = None  # int64 [B, T]
    turn_index: Tensor | None = None  # int64 [B, T], -1 where not trainable
    turn_reward: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    trajectory_id: Tensor | None = None  # int64 [B]
    reward: Tensor | None = None  # float32 [B]
    reward_baseline: Tensor | None = None  # float32 [B]
    routes: tuple[Tensor | None, ...] = ()
    merge_info: tuple[MergedRow | None, ...] | None = None

    @property
    def rows(self) -> int:
        """B, padding rows included."""
        return int(self.input_ids.shape[0])

    @property
    def width(self) -> int:
        """T, the padded width."""
        return int(self.input_ids.shape[1])

    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [int(n) for n in self.attention_mask.sum(dim=1).tolist()]

    def column(self, name: str) -> Tensor:
        """The column ``name``; a BatchError that names it where the trainer did not write it."""
        if name not in TOKEN_COLUMNS + ROW_COLUMNS:
            known = ", ".join(TOKEN_COLUMNS + ROW_COLUMNS)
            raise BatchError(f"batch of dp rank {self.dp_rank}: no column {name!r}; known: {known}")
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise BatchError(
                f"batch of dp rank {self.dp_rank}: column {name!r} is absent, but the loss "
                f"settings need it. Check the trainer's options that write it."
            )
        return value

    def replace(self, **columns: Any) -> RankBatch:
        """A copy with other columns; the tensors that are not named are shared, never copied."""
        return dataclasses.replace(self, **columns)

    def clone(self) -> RankBatch:
        """A copy that shares no memory: what a patch gets, so that writing into it harms nobody."""
        copied: dict[str, Any] = {}
        for name in TOKEN_COLUMNS + ROW_COLUMNS:
            value = getattr(self, name)
            if value is not None:
                copied[name] = value.clone()
        copied["routes"] = tuple(r if r is None else r.clone() for r in self.routes)
        return dataclasses.replace(self, **copied)

    def to(self, device: torch.device | str) -> RankBatch:
        """Loss columns on ``device``; routes stay where they are."""
        moved: dict[str, Any] = {}
        for name in TOKEN_COLUMNS + ROW_COLUMNS:
            value = getattr(self, name)
            if value is not None:
                moved[name] = value.to(device)
        return dataclasses.replace(self, **moved)

    def select(self, rows: Sequence[int]) -> RankBatch:
        """The rows ``rows``, in that order, with their routes."""
        picked: dict[str, Any] = {}
        for name in TOKEN_COLUMNS + ROW_COLUMNS:
            value = getattr(self, name)
            if value is not None:
                picked[name] = value[list(rows)]
        return self.with_rows(rows, picked)

    def with_rows(self, rows: Sequence[int], columns: Mapping[str, Tensor]) -> RankBatch:
        """``columns`` as those of the rows ``rows``, with the routes and trees of these."""
        picked: dict[str, Any] = dict(columns)
        picked["routes"] = tuple(self.routes[r] for r in rows) if self.routes else ()
        if self.merge_info is not None:
            picked["merge_info"] = tuple(self.merge_info[r] for r in rows)
        return dataclasses.replace(self, **picked)
