"""One rank's columns: values, masks, labels, and how far trainer and rollout engine are apart.

Legend: B rows, T padded width. Rows that are prefix trees are not looked at for labels and masks:
their next token is not the next position.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from replay_lib.analysis.findings import Finding, Place, finding
from replay_lib.batch import RankBatch
from replay_lib.loss import GrpoSettings
from replay_lib.loss.inputs import READ_ALWAYS

#: e**10 is 22,026: one token that is so much likelier to one engine than to the other.
LARGE_LOG_RATIO = 10.0
#: The same for a whole row; engines that agree (a few 0.01 nats a token) reach it by length alone.
LARGE_LOG_WEIGHT = 10.0
#: Rounding of a log-softmax in float32 or bfloat16 stays below.
POSITIVE = 1e-2
#: A token that its own policy gives less than e**-1 cannot have had the probability 1.
CERTAIN = -1.0

FLOATS = (
    "advantage",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "turn_reward",
    "old_values",
    "returns",
)


def check_columns(
    batch: RankBatch, file: Path, settings: GrpoSettings | None, vocab: int | None
) -> Iterator[Finding]:
    """Findings about the columns of ``batch``; ``vocab`` is the embedding's number of rows."""
    yield from _absent(batch, file, settings)
    yield from _rows(batch, file)
    yield from _not_finite(batch, file)
    yield from _tokens(batch, file, vocab)
    yield from _labels(batch, file)
    yield from _log_probs(batch, file)
    yield from _apart(batch, file)


def first(bad_BT: Tensor, batch: RankBatch) -> Place:
    """The first row and token of a mask that is not empty."""
    row, token = (int(i) for i in bad_BT.nonzero()[0])
    return Place(dp_rank=batch.dp_rank, row=row, token=token)


def numbers(rows: list[int]) -> str:
    """Row numbers for a reader, the first few of many."""
    shown = ", ".join(map(str, rows[:8]))
    return shown if len(rows) <= 8 else f"{shown}, ... ({len(rows)} rows)"


def _absent(batch: RankBatch, file: Path, settings: GrpoSettings | None) -> Iterator[Finding]:
    teacher = ("teacher_logprobs",) if settings is not None and settings.opd.enabled else ()
    absent = [name for name in (*READ_ALWAYS, *teacher) if getattr(batch, name) is None]
    if absent:
        found = f"no column {', '.join(absent)}"
        yield finding("column-absent", file, found, Place(dp_rank=batch.dp_rank))


def _rows(batch: RankBatch, file: Path) -> Iterator[Finding]:
    at = Place(dp_rank=batch.dp_rank)
    empty = [row for row, n in enumerate(batch.lengths()) if n == 0]
    if empty:
        yield finding("row-empty", file, f"no token in rows {numbers(empty)}", at)
    padding_B = batch.index < 0
    if bool(padding_B.any()):
        tokens = int(batch.attention_mask[padding_B].sum())
        whole = int(batch.attention_mask.sum())
        count = int(padding_B.sum())
        found = f"{count} of {batch.rows} rows, {tokens} of {whole} tokens, are padding"
        yield finding("rows-padding", file, found, at)
    trains_B = batch.loss_mask.any(dim=1)
    if not bool(trains_B.any()):
        yield finding("rank-without-loss", file, f"no loss token in {batch.rows} rows", at)
        return
    idle = (~trains_B & ~padding_B).nonzero().flatten().tolist()
    if idle:
        found = f"no loss token in rows {numbers(idle)} of {batch.rows}"
        yield finding("row-without-loss", file, found, at)


def _not_finite(batch: RankBatch, file: Path) -> Iterator[Finding]:
    for name in FLOATS:
        values: Tensor | None = getattr(batch, name)
        if values is None:
            continue
        bad_BT = ~values.isfinite()
        for code, here_BT in (
            ("value-not-finite", bad_BT & batch.loss_mask),
            ("masked-value-not-finite", bad_BT & ~batch.loss_mask),
        ):
            if bool(here_BT.any()):
                at = first(here_BT, batch)
                value = float(values[at.row, at.token])
                found = f"{name} is {value} ({int(here_BT.sum())} such values)"
                yield finding(code, file, found, at)


def _tokens(batch: RankBatch, file: Path, vocab: int | None) -> Iterator[Finding]:
    if vocab is None:
        return
    for name, mask in (("input_ids", batch.attention_mask), ("labels", batch.loss_mask)):
        values = batch.column(name)
        bad_BT = ((values < 0) | (values >= vocab)) & mask
        if bool(bad_BT.any()):
            at = first(bad_BT, batch)
            found = f"{name} {int(values[at.row, at.token])}, not 0 to {vocab - 1}"
            yield finding("token-outside", file, f"{found} ({int(bad_BT.sum())} such)", at)


def _labels(batch: RankBatch, file: Path) -> Iterator[Finding]:
    flat_B1 = torch.ones(batch.rows, 1, dtype=torch.bool)
    for row, tree in enumerate(batch.merge_info or ()):
        flat_B1[row] = tree is None
    mask_BT = batch.loss_mask & flat_B1
    following_BT = batch.attention_mask.roll(-1, dims=1)
    following_BT[:, -1] = False
    outside_BT = mask_BT & ~following_BT
    if bool(outside_BT.any()):
        found = f"{int(outside_BT.sum())} loss tokens without a next token"
        yield finding("mask-outside", file, found, first(outside_BT, batch))
    next_BT = batch.input_ids.roll(-1, dims=1)
    wrong_BT = mask_BT & following_BT & (batch.labels != next_BT)
    if bool(wrong_BT.any()):
        at = first(wrong_BT, batch)
        label, token = int(batch.labels[at.row, at.token]), int(next_BT[at.row, at.token])
        found = f"label {label} where the next token is {token} ({int(wrong_BT.sum())} such)"
        yield finding("labels-differ", file, found, at)


def _log_probs(batch: RankBatch, file: Path) -> Iterator[Finding]:
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs"):
        values: Tensor | None = getattr(batch, name)
        if values is None:
            continue
        high_BT = batch.loss_mask & (values > POSITIVE) & values.isfinite()
        if bool(high_BT.any()):
            at = first(high_BT, batch)
            value = float(values[at.row, at.token])
            found = f"{name} {value:.4g} ({int(high_BT.sum())} such values)"
            yield finding("logprob-positive", file, found, at)
    old, rollout = batch.old_logprobs, batch.rollout_logprobs
    if old is not None and rollout is not None:
        none_BT = batch.loss_mask & (rollout == 0) & (old < CERTAIN)
        if bool(none_BT.any()):
            count, whole = int(none_BT.sum()), int(batch.loss_mask.sum())
            found = f"{count} of {whole} loss tokens have exactly 0"
            yield finding("logprob-absent", file, found, first(none_BT, batch))


def _apart(batch: RankBatch, file: Path) -> Iterator[Finding]:
    """Old (trainer) against rollout log-probabilities on loss tokens, token by token and summed."""
    if batch.old_logprobs is None or batch.rollout_logprobs is None:
        return
    ratio_BT = (batch.old_logprobs.double() - batch.rollout_logprobs.double()) * batch.loss_mask
    ratio_BT = ratio_BT.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # told as not finite
    far_BT = ratio_BT.abs() > LARGE_LOG_RATIO
    if bool(far_BT.any()):
        row, token = divmod(int(ratio_BT.abs().argmax()), batch.width)
        at = Place(dp_rank=batch.dp_rank, row=row, token=token)
        found = (
            f"old - rollout is {float(ratio_BT[row, token]):.4g} nats, the largest of "
            f"{int(far_BT.sum())} tokens beyond {LARGE_LOG_RATIO:g}"
        )
        yield finding("logratio-large", file, found, at)
    weight_B = ratio_BT.sum(dim=1)
    heavy_B = weight_B.abs() > LARGE_LOG_WEIGHT
    if bool(heavy_B.any()):
        row = int(weight_B.abs().argmax())
        count = int(batch.loss_mask[row].sum())
        total = float(weight_B[row])
        found = (
            f"{count} log-ratios of {total / count:.3g} nats on average add up to {total:.4g}: a "
            f"weight of e^{total:.0f}, the largest of {int(heavy_B.sum())} rows"
        )
        at = Place(dp_rank=batch.dp_rank, row=row)
        yield finding("sequence-weight-explodes", file, found, at)
