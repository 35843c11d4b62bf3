"""Rewards, the groups that share a prompt, trajectories, and rows that are there twice.

A batch names no groups. Rows of one group begin with the same prompt: all tokens up to the first
that trains. Prompts and rows are kept as 16-byte digests, a few hundred bytes a row in all.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.analysis.signals.figures import Distribution
from replay_lib.analysis.signals.lengths import first_loss
from replay_lib.analysis.signals.stream import Stream
from replay_lib.analysis.signals.summary import Groups, Rewards, RowPlace, Trajectories
from replay_lib.analysis.signals.view import View

MOST_TOLD = 5


@dataclass
class _Group:
    """Trajectories seen, and the range of their rewards; ``known``: no reward was NaN or absent."""

    rows: list[RowPlace] = field(default_factory=list)
    members: set[tuple[int, int]] = field(default_factory=set)
    least: float = float("inf")
    most: float = float("-inf")
    known: bool = True

    @property
    def judged(self) -> bool:
        return self.known and len(self.members) > 1


@dataclass
class RewardStage:
    """``repeated`` are rows with the tokens of an earlier one, with how many had them before."""

    reward: Stream | None = None
    baseline: Stream | None = None
    difference: Stream | None = None
    groups: dict[bytes, _Group] = field(default_factory=dict)
    seen: Counter[bytes] = field(default_factory=Counter)
    indexes: Counter[int] = field(default_factory=Counter)
    repeated: list[RowPlace] = field(default_factory=list)
    trained: int = 0
    trajectories: Counter[int] | None = None
    unknown: int = 0

    def add(self, view: View) -> None:
        """Take in one rank."""
        batch, real_B = view.batch, view.real_B
        if batch.reward is not None:
            self.reward = _added(self.reward, batch.reward[real_B])
        if batch.reward_baseline is not None:
            self.baseline = _added(self.baseline, batch.reward_baseline[real_B])
        if batch.reward is not None and batch.reward_baseline is not None:
            gap_B = batch.reward.double() - batch.reward_baseline.double()
            self.difference = _added(self.difference, gap_B[real_B])
        self.indexes.update(batch.index[real_B].tolist())
        if batch.trajectory_id is not None:
            ids = batch.trajectory_id[real_B].tolist()
            self.trajectories = self.trajectories or Counter()
            self.trajectories.update(i for i in ids if i >= 0)
            self.unknown += sum(i < 0 for i in ids)
        self._rows(view)

    def _rows(self, view: View) -> None:
        first_B, lengths = first_loss(view).tolist(), view.batch.lengths()
        for row in view.loss_BT.any(dim=1).nonzero().flatten().tolist():
            ids = view.batch.input_ids[row]
            prompt, whole = _digest(ids[: first_B[row] + 1]), _digest(ids[: lengths[row]])
            self.trained += 1
            if self.seen[whole]:
                self.repeated.append(view.place(row, float(self.seen[whole])))
            self.seen[whole] += 1
            self._member(view, row, self.groups.setdefault(prompt, _Group()))

    def _member(self, view: View, row: int, group: _Group) -> None:
        place = view.place(row, 0.0)
        known = place.trajectory_id is not None and place.trajectory_id >= 0
        # rows of one trajectory are one member; where none is named each row is its own
        group.members.add((-1, place.trajectory_id or 0) if known else (view.dp_rank, row))
        reward = float("nan") if view.batch.reward is None else float(view.batch.reward[row])
        group.rows.append(place.model_copy(update={"value": reward}))
        group.known &= abs(reward) < float("inf")
        group.least, group.most = min(group.least, reward), max(group.most, reward)

    def flat(self) -> list[_Group]:
        """Groups of two trajectories or more that all have one reward."""
        return [g for g in self.groups.values() if g.judged and g.least == g.most]

    def result(self) -> Rewards:
        """All ranks."""
        sizes = _added(None, torch.tensor([len(g.members) for g in self.groups.values()]))
        return Rewards(
            reward=_told(self.reward),
            baseline=_told(self.baseline),
            difference=_told(self.difference),
            groups=Groups(
                groups=len(self.groups),
                judged=sum(g.judged for g in self.groups.values()),
                zero_variance=len(self.flat()),
                sizes=sizes.distribution(),
                largest=max((len(g.members) for g in self.groups.values()), default=0),
            ),
        )

    def trajectory_result(self) -> Trajectories:
        """All ranks."""
        if self.trajectories is None:
            return Trajectories(trajectories=None, unknown=0, rows_a_trajectory=None)
        counts = _added(None, torch.tensor(list(self.trajectories.values())))
        return Trajectories(
            trajectories=len(self.trajectories),
            unknown=self.unknown,
            rows_a_trajectory=counts.distribution(),
            most=tuple(self.trajectories.most_common(MOST_TOLD)),
        )

    @property
    def repeated_indexes(self) -> int:
        """Rows whose number in the training window an earlier row has."""
        return sum(n - 1 for n in self.indexes.values())


def _added(stream: Stream | None, values: Tensor) -> Stream:
    found = stream or Stream()
    found.add(values)
    return found


def _told(stream: Stream | None) -> Distribution | None:
    return None if stream is None else stream.distribution()


def _digest(ids: Tensor) -> bytes:
    return hashlib.blake2b(ids.contiguous().numpy().data, digest_size=16).digest()
