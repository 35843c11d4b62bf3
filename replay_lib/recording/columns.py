"""This rank's batch as the loop has it: a mapping of columns, with the obvious ones filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.errors import BatchError, did_you_mean, fault

if TYPE_CHECKING:
    from torch import Tensor

_BASES = ("old_logprobs", "rollout_logprobs", "ref_logprobs")  # AXRL's loss reads all of them
NEEDED = ("input_ids", "loss_mask", "attention_mask", "advantage", *_BASES)
IGNORE = -100
_INT64 = ("input_ids", "labels", "position_ids", "turn_index", "index", "trajectory_id")
_BOOL = ("loss_mask", "attention_mask")


def rank_batch(given: RankBatch | Mapping[str, Any], dp_rank: int) -> RankBatch:
    """``given`` as data-parallel rank ``dp_rank``'s batch, on the CPU, in the columns' dtypes.

    It needs ``input_ids``, ``loss_mask``, ``attention_mask``, ``advantage`` and the
    log-probabilities ``old_logprobs``, ``rollout_logprobs`` and ``ref_logprobs``, all ``[B, T]``
    and label-aligned (the value at t belongs to token t + 1). Of a mapping ``labels`` are the next
    tokens where ``loss_mask`` is true, else -100; ``index`` numbers the rows. ``routes`` is a list
    of int16 ``[n - 1, L, K]``, one a row of n tokens. Raises BatchError that names the column.
    """
    if isinstance(given, RankBatch):
        batch = given.replace(dp_rank=dp_rank).to("cpu")
    else:
        batch = _from_mapping(given, dp_rank)
    _check(batch)
    return batch


def _from_mapping(given: Mapping[str, Any], dp_rank: int) -> RankBatch:
    import torch

    known = (*TOKEN_COLUMNS, *ROW_COLUMNS, "routes")
    where = f"batch of dp rank {dp_rank}"
    for name in given:
        if name not in known:
            then = did_you_mean(name, known)
            raise BatchError(fault(where, name, "a column nobody knows", ", ".join(known), then))
    for name in NEEDED:
        if given.get(name) is None:
            raise _absent(where, name)
    columns: dict[str, Any] = {
        name: _tensor(where, name, value)
        for name, value in given.items()
        if name != "routes" and value is not None
    }
    routes = given.get("routes") or ()
    columns["routes"] = tuple(None if r is None else torch.as_tensor(r).cpu() for r in routes)
    ids = columns["input_ids"]
    columns.setdefault("index", torch.arange(len(ids)))
    if "labels" not in columns and ids.dim() == 2 and columns["loss_mask"].shape == ids.shape:
        labels = torch.full_like(ids, IGNORE)
        labels[:, :-1] = ids[:, 1:].where(columns["loss_mask"][:, :-1], IGNORE)
        columns["labels"] = labels
    columns.setdefault("labels", ids)  # of shapes that the check refuses
    return RankBatch(dp_rank=dp_rank, **columns)


def _tensor(where: str, name: str, value: Any) -> Tensor:
    import torch

    dtype = torch.int64 if name in _INT64 else torch.bool if name in _BOOL else torch.float32
    try:
        return torch.as_tensor(value).detach().to("cpu", dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(fault(where, name, type(value).__name__, "a tensor")) from error


def _absent(where: str, name: str) -> BatchError:
    then = "A loss that has none of its own is given the old ones." if name in _BASES else None
    return BatchError(fault(where, name, "nothing", "a column [rows, tokens]", then))


def _check(batch: RankBatch) -> None:
    where = f"batch of dp rank {batch.dp_rank}"
    for name in NEEDED:
        if getattr(batch, name) is None:
            raise _absent(where, name)
    if batch.input_ids.dim() != 2:
        found = f"shape {list(batch.input_ids.shape)}"
        raise BatchError(fault(where, "input_ids", found, "[rows, tokens]"))
    rows, width = batch.input_ids.shape
    for names, shape in ((TOKEN_COLUMNS, (rows, width)), (ROW_COLUMNS, (rows,))):
        for name in names:
            value = getattr(batch, name)
            if value is not None and tuple(value.shape) != shape:
                found = f"shape {list(value.shape)}"
                raise BatchError(fault(where, name, found, f"{list(shape)}, as input_ids has it"))
    if batch.routes and len(batch.routes) != rows:
        raise BatchError(fault(where, "routes", f"{len(batch.routes)} rows", f"{rows}"))
    for row, (route, length) in enumerate(zip(batch.routes, batch.lengths(), strict=False)):
        if route is not None and (route.dim() != 3 or route.shape[0] != length - 1):
            expected = f"[{length - 1}, layers, top-k]: one less than the row's tokens"
            raise BatchError(fault(where, f"routes[{row}]", f"{list(route.shape)}", expected))
