"""Rows of a dump, whatever trainer wrote it, as batches.

Legend: n tokens of a row, R of them the response, B rows, T padded width, L layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError, fault
from replay_lib.snapshot.imported import ImportedField, State

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One row. ``tokens`` int64 ``[n]``; the response is its last ``R`` tokens.

    ``trains`` is bool ``[R]``, ``values`` float32 ``[R]`` by column name: the value at i belongs to
    response token i. ``routes`` int16 ``[n - 1, L, K]``. ``group`` identifies the prompt.
    """

    where: str
    tokens: Tensor
    trains: Tensor
    values: Mapping[str, Tensor]
    reward: float | None = None
    group: Any = None
    trajectory: int | None = None
    routes: Tensor | None = None
    dp_rank: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Dump:
    """A dump as it was read: ``format`` such as "slime train", ``step`` as the dump counts."""

    format: str
    step: int
    rows: Sequence[Row]
    fields: Sequence[ImportedField] = field(default=())


def batches_of(rows: Sequence[Row]) -> list[RankBatch]:
    """One batch a data-parallel rank, ranks renumbered from 0; columns that no row has are None.

    A batch has to have advantages: where the dump has none they are zero. ``reward_baseline`` is
    the mean reward of the row's group. BatchError names a row whose parts do not fit.
    """
    if not rows:
        raise BatchError(fault("dump", "samples", "none", "one or more"))
    for row in rows:
        _check(row)
    ranks = sorted({row.dp_rank for row in rows})
    means = _group_means(rows)
    numbered = list(enumerate(rows))
    return [
        _batch(
            number, [(i, row, means.get(row.group)) for i, row in numbered if row.dp_rank == rank]
        )
        for number, rank in enumerate(ranks)
    ]


def told(name: str, state: State, text: str) -> ImportedField:
    """A line about one field."""
    return ImportedField(name=name, state=state, told=text)


def _check(row: Row) -> None:
    length, answered = len(row.tokens), len(row.trains)
    if length < 2 or not answered <= length:
        found = f"{length} tokens, {answered} of them the response"
        raise BatchError(fault(row.where, "tokens", found, "two or more, and no longer response"))
    for name, value in row.values.items():
        if value.shape != (answered,):
            found = f"{list(value.shape)} values"
            then = "A part of a context-parallel rank is no whole response."
            raise BatchError(fault(row.where, name, found, f"{answered}, the response", then))
    if row.routes is not None and (row.routes.dim() != 3 or len(row.routes) != length - 1):
        found, expected = f"{list(row.routes.shape)}", f"[{length - 1}, layers, top-k]"
        raise BatchError(fault(row.where, "routed experts", found, expected))


def _group_means(rows: Sequence[Row]) -> dict[Any, float]:
    found: dict[Any, list[float]] = {}
    for row in rows:
        if row.group is not None and row.reward is not None:
            found.setdefault(row.group, []).append(row.reward)
    return {group: sum(values) / len(values) for group, values in found.items()}


def _batch(number: int, rows: Sequence[tuple[int, Row, float | None]]) -> RankBatch:
    import torch

    size, width = len(rows), max(len(row.tokens) for _, row, _ in rows)
    columns: dict[str, Any] = {
        "index": torch.tensor([i for i, _, _ in rows]),
        "input_ids": torch.zeros(size, width, dtype=torch.int64),
        "labels": torch.full((size, width), IGNORE),
        "attention_mask": torch.zeros(size, width, dtype=torch.bool),
        "loss_mask": torch.zeros(size, width, dtype=torch.bool),
        "advantage": torch.zeros(size, width),
    }
    names = {name for _, row, _ in rows for name in row.values}
    columns |= {name: torch.zeros(size, width) for name in names}
    for place, (_, row, _) in enumerate(rows):
        _fill(columns, place, row)
    for name, values in (
        ("reward", [row.reward for _, row, _ in rows]),
        ("reward_baseline", [mean for _, _, mean in rows]),
    ):
        if None not in values:
            columns[name] = torch.tensor(values, dtype=torch.float32)
    trajectories = [row.trajectory for _, row, _ in rows]
    if None not in trajectories:
        columns["trajectory_id"] = torch.tensor(trajectories)
    routes = tuple(row.routes for _, row, _ in rows)
    return RankBatch(dp_rank=number, **columns, routes=routes)


def _fill(columns: dict[str, Any], place: int, row: Row) -> None:
    """The value of response token i stands where it is predicted from: one position before."""
    length, answered = len(row.tokens), len(row.trains)
    columns["input_ids"][place, :length] = row.tokens
    columns["attention_mask"][place, :length] = True
    skipped = 1 if answered == length else 0  # the first token of all is predicted from nothing
    first = length - answered + skipped
    here = slice(first - 1, length - 1)
    trains = row.trains[skipped:]
    columns["loss_mask"][place, here] = trains
    columns["labels"][place, here] = row.tokens[first:].where(trains, IGNORE)
    for name, value in row.values.items():
        kept = value[skipped:]
        columns[name][place, here] = kept * trains if name == "advantage" else kept
