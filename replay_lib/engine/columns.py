"""Loss columns of one micro-batch on the device: what no patch changed is copied there once.

Experiments of one forward mostly read the same columns. A copy to a device waits for it, so one for
each experiment costs more than the loss does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch

#: Unpatched columns of the micro-batch by name; as large as one copy of it, and gone with it.
Shared = dict[str, Tensor]


def rows_on_device(
    batch: RankBatch, own: RankBatch, rows: Sequence[int], shared: Shared, device: torch.device
) -> RankBatch:
    """Rows ``rows`` of ``batch`` with their columns on ``device``; routes stay on the CPU.

    A column that is the very tensor which ``own``, the recorded batch, has is taken from
    ``shared`` and put there first if need be: every experiment gets the same tensor, so whoever
    writes into it writes into a copy (:func:`apart`). Any other column is this experiment's own.
    """
    columns: dict[str, Tensor] = {}
    for name in TOKEN_COLUMNS + ROW_COLUMNS:
        value: Tensor | None = getattr(batch, name)
        if value is None:
            continue
        if value is not getattr(own, name):
            columns[name] = value[list(rows)].to(device)
            continue
        if name not in shared:
            shared[name] = value[list(rows)].to(device)
        columns[name] = shared[name]
    return batch.with_rows(rows, columns)


def apart(batch: RankBatch) -> RankBatch:
    """``batch`` with columns of its own, for code that may write into them."""
    names = TOKEN_COLUMNS + ROW_COLUMNS
    return batch.replace(**{n: v.clone() for n in names if (v := getattr(batch, n)) is not None})


def unchanged_as_given(before: RankBatch, after: RankBatch) -> RankBatch:
    """``after`` with the tensors of ``before`` wherever a patch left every bit of a column."""
    names = TOKEN_COLUMNS + ROW_COLUMNS
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in names}
    return after.replace(**{name: old for name, (old, new) in pairs.items() if _same(old, new)})


def _same(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None or old.dtype != new.dtype or old.shape != new.shape:
        return False
    # of two zeros one may be negative, and a NaN equals nothing: bits, not values
    return torch.equal(*(value.detach().contiguous().view(torch.uint8) for value in (old, new)))
