"""Columns of a batch: which there must be, of which dtype and shape. Nothing is ever converted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS
from replay_lib.errors import BatchError, fault

if TYPE_CHECKING:
    from torch import Tensor

REQUIRED = ("index", "input_ids", "labels", "loss_mask", "attention_mask", "advantage")
_INT64 = frozenset({"index", "input_ids", "labels", "position_ids", "turn_index", "trajectory_id"})
_BOOL = frozenset({"loss_mask", "attention_mask"})


def checked_columns(path: Path, raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """The known columns among ``raw``, as stored; BatchError names a wrong or absent one."""
    absent = [name for name in REQUIRED if name not in raw]
    if absent:
        raise BatchError(
            fault(path, ", ".join(absent), "no such column", "a column that every batch has")
        )
    shape = _shape(path, raw["input_ids"])
    return {
        name: _checked(path, name, raw[name], shape)
        for name in (*TOKEN_COLUMNS, *ROW_COLUMNS)
        if name in raw
    }


def _shape(path: Path, tokens: Any) -> tuple[int, int]:
    import torch

    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or 0 in tokens.shape:
        raise BatchError(fault(path, "input_ids", _describe(tokens), "int64 [B, T]"))
    return int(tokens.shape[0]), int(tokens.shape[1])


def _checked(path: Path, name: str, value: Any, shape: tuple[int, int]) -> Tensor:
    import torch

    dtype = torch.int64 if name in _INT64 else torch.bool if name in _BOOL else torch.float32
    wanted = shape if name in TOKEN_COLUMNS else shape[:1]
    if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.shape != wanted:
        kind = str(dtype).removeprefix("torch.")
        raise BatchError(fault(path, name, _describe(value), f"{kind} {list(wanted)}"))
    return value.contiguous()


def _describe(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
