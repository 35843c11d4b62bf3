"""A data-parallel rank's batch as a :class:`~replay_lib.batch.RankBatch`.

Columns are checked for dtype and shape and are never converted. Routes come from the payload
file of the same rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.errors import BatchError, SnapshotError, fault
from replay_lib.merged import MergedRow
from replay_lib.snapshot.model import RankFiles, Snapshot
from replay_lib.snapshot.pickles import load_untrusted
from replay_lib.snapshot.routes import (
    Handle,
    Paths,
    handle_paths,
    payload_by_handle,
    plain_tree,
    read_payload,
    tie,
    unwrap,
)
from replay_lib.snapshot.stand_ins import batch_table, is_a

if TYPE_CHECKING:
    from torch import Tensor

REQUIRED = ("index", "input_ids", "labels", "loss_mask", "attention_mask", "advantage")
_INT64 = frozenset({"index", "input_ids", "labels", "position_ids", "turn_index", "trajectory_id"})
_BOOL = frozenset({"loss_mask", "attention_mask"})
_HANDLES, _MERGE = "routing_handles_per_path", "merge_info"


def load_batch(snapshot: Snapshot, dp_rank: int) -> RankBatch:
    """The batch of data-parallel rank ``dp_rank`` (0..dp-1) on the CPU, with its routes.

    Rows that are prefix trees are marked in ``merge_info`` (a MergedRow) and have no routes of
    their own. Raises BatchError for a column or a payload of the wrong dtype, shape or count,
    and the errors of reading an untrusted file.
    """
    files = snapshot.files_of(dp_rank)
    columns = read_columns(files.batch)
    paths, trees = _pop_non_tensors(columns, files.batch)
    payload = payload_by_handle(paths, files.routing, _routing_file(snapshot, files))
    routes, merged = _split(tie(paths, payload), trees)
    batch = RankBatch(
        dp_rank=dp_rank,
        routes=tuple(routes),
        merge_info=tuple(merged) if any(merged) else None,
        **columns,
    )
    _check_mask(batch, files.batch)
    return batch


def load_handles(
    snapshot: Snapshot, dp_rank: int
) -> tuple[list[Paths | None], dict[Handle, Tensor]]:
    """Handles of each row by path, and the routes of each, as stored.

    Errors as of :func:`load_batch`.
    """
    files = snapshot.files_of(dp_rank)
    paths, _trees_of_rows = _pop_non_tensors(read_columns(files.batch), files.batch)
    return paths, payload_by_handle(paths, files.routing, _routing_file(snapshot, files))


def payload_counts(snapshot: Snapshot) -> dict[int, int]:
    """Routing payloads of each data-parallel rank, counted in the files."""
    return {
        files.dp_rank: len(read_payload(files.routing)) if files.routing else 0
        for files in snapshot.dp_rank_files
    }


def _routing_file(snapshot: Snapshot, files: RankFiles) -> Path:
    return snapshot.path / layout.routing_file(files.rank)


def _pop_non_tensors(
    columns: dict[str, Any], path: Path
) -> tuple[list[Paths | None], list[dict[str, Any] | None]]:
    """Handles and prefix trees of each row, taken out of ``columns``."""
    rows = int(columns["input_ids"].shape[0])
    try:
        paths = handle_paths(columns.pop(_HANDLES, None), rows)
        trees = _trees(columns.pop(_MERGE, None), rows)
    except (ValueError, TypeError, AttributeError) as error:
        raise SnapshotError(
            fault(path, _HANDLES, str(error), "handles or trees for each row")
        ) from error
    return paths, trees


def read_columns(path: Path) -> dict[str, Any]:
    """Columns of a batch file: checked tensors, and the two non-tensor columns as stored."""
    found = load_untrusted(path, batch_table(), "the batch of one rank")
    try:
        raw = _column_table(found)
    except ValueError as error:
        raise SnapshotError(fault(path, None, str(error), "a saved batch")) from error
    absent = [name for name in REQUIRED if name not in raw]
    if absent:
        raise BatchError(
            fault(path, ", ".join(absent), "no such column", "a column that every batch has")
        )
    shape = _shape(path, raw["input_ids"])
    columns = {name: raw[name] for name in (_HANDLES, _MERGE) if name in raw}
    for name in (*TOKEN_COLUMNS, *ROW_COLUMNS):
        if name in raw:
            columns[name] = _checked(path, name, raw[name], shape)
    return columns


def _column_table(found: Any) -> dict[str, Any]:
    state = None
    if is_a(found, "SampleTensorDict", "TensorDict"):
        state = found.state
    elif is_a(found, "_make_td") and len(found.args) == 2:  # a plain TensorDict: class and state
        state = found.args[1]
    if not isinstance(state, dict):
        raise ValueError(f"a {type(found).__name__}")
    table = state.get("_tensordict")
    if not isinstance(table, dict):
        raise ValueError(f"a batch whose columns are a {type(table).__name__}")
    return table


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


def _trees(column: Any, rows: int) -> list[dict[str, Any] | None]:
    column = unwrap(column)
    if column is None:
        return [None] * rows
    if not isinstance(column, list) or len(column) != rows:
        raise ValueError(f"prefix trees of a {type(column).__name__} for {rows} rows")
    return [plain_tree(item) for item in column]


def _split(
    by_path: list[list[Tensor] | None], trees: list[dict[str, Any] | None]
) -> tuple[list[Tensor | None], list[MergedRow | None]]:
    """Routes of plain rows, and the rows that have a tree or several paths."""
    routes: list[Tensor | None] = []
    merged: list[MergedRow | None] = []
    for paths, tree in zip(by_path, trees, strict=True):
        several = tree is not None or (paths is not None and len(paths) > 1)
        merged.append(MergedRow(path_routes=tuple(paths or ()), tree=tree) if several else None)
        routes.append(paths[0] if paths and not several else None)
    return routes, merged


def _check_mask(batch: RankBatch, path: Path) -> None:
    """Real tokens come first: everything downstream relies on it."""
    import torch

    lengths = batch.attention_mask.sum(dim=1, keepdim=True)
    front = torch.arange(batch.width) < lengths
    holes = (front != batch.attention_mask).any(dim=1)
    if bool(holes.any()):
        row = int(holes.nonzero()[0])
        raise BatchError(
            fault(path, f"attention_mask of row {row}", "a hole", "real tokens first, then padding")
        )
