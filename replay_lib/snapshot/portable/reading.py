"""This library's own layout. A :class:`~replay_lib.snapshot.reader.Reader`, as a module.

Every file is compared with its sha256 before anything of it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.errors import BatchError, SnapshotError, fault
from replay_lib.snapshot.columns import checked_columns
from replay_lib.snapshot.documents import NO_TRAINER, missing
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.portable.codec import from_bytes
from replay_lib.snapshot.portable.manifest import Manifest, manifest_of
from replay_lib.snapshot.portable.opening import WORKER_IS
from replay_lib.snapshot.reader import StoredBatch
from replay_lib.snapshot.routes import Handle, Paths

if TYPE_CHECKING:
    from torch import Tensor

#: Names of columns and of the trees' arrays in one tensor file.
COLUMN, TREE = "column.", "tree."
_BATCH_IS = "the batch of one data-parallel rank"
_ROUTES_ARE = "the routing payloads of the batch's handles"


def stored_batch(snapshot: Snapshot, dp_rank: int) -> StoredBatch:
    """Columns, handles and prefix trees of the rank's two batch files."""
    from replay_lib.snapshot.portable.tensors import read_all

    manifest = manifest_of(snapshot.path)
    file = manifest.verified(layout.portable_columns(dp_rank), _BATCH_IS)
    tensors = read_all(file)
    raw = {n.removeprefix(COLUMN): t for n, t in tensors.items() if n.startswith(COLUMN)}
    columns = checked_columns(file, raw)
    other = manifest.verified(layout.portable_rows(dp_rank), _BATCH_IS)
    document = from_bytes(other.read_bytes(), other, tensors.__getitem__)
    rows = int(columns["input_ids"].shape[0])
    try:
        paths, trees = _rows(document, "paths", rows), _rows(document, "trees", rows)
        return StoredBatch(
            columns=columns,
            paths=[None if row is None else _paths(row) for row in paths],
            trees=[None if tree is None else _tree(tree) for tree in trees],
            where=file,
        )
    except (ValueError, TypeError) as error:
        raise SnapshotError(
            fault(other, None, str(error), "handles and trees for each row")
        ) from error


def _rows(document: Any, key: str, rows: int) -> list[Any]:
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list) or len(found) != rows:
        raise ValueError(f"{key} of a {type(found).__name__} for {rows} rows")
    return found


def _paths(row: Any) -> Paths:
    return [[_handle(item) for item in path] for path in row]


def _handle(item: Any) -> Handle:
    ref, start, count = item
    if not isinstance(ref, str | tuple) or type(start) is not int:
        raise ValueError(f"a handle {item!r:.60}")
    if count is not None and type(count) is not int:
        raise ValueError(f"a handle {item!r:.60}")
    hash(ref)  # a TypeError where it cannot be compared
    return ref, start, count


def _tree(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise ValueError(f"a tree of a {type(tree).__name__}")
    return tree


def may_hold_trees(snapshot: Snapshot, dp_rank: int) -> bool:
    """Whether a row of the batch is not known to have no tree."""
    manifest = manifest_of(snapshot.path)
    file = manifest.verified(layout.portable_rows(dp_rank), _BATCH_IS)
    try:
        trees = json.loads(file.read_bytes())["trees"]
        return any(tree is not None for tree in trees)
    except (ValueError, TypeError, KeyError, RecursionError):
        return True  # reading it whole tells what is wrong


def stored_payload(snapshot: Snapshot, dp_rank: int) -> list[Tensor] | None:
    """Routes of the rank's handles, in their order."""
    import torch

    from replay_lib.snapshot.portable.tensors import read_all

    manifest, name = manifest_of(snapshot.path), layout.portable_routing(dp_rank)
    if not manifest.has(name):
        return None
    file = manifest.verified(name, _ROUTES_ARE)
    tensors = read_all(file)
    wanted = [str(number) for number in range(len(tensors))]
    if sorted(tensors) != sorted(wanted):
        raise BatchError(fault(file, None, f"names {sorted(tensors)[:5]}", "numbers from 0"))
    payload = [tensors[number] for number in wanted]
    ids = (torch.int8, torch.uint8, torch.int16)
    for number, routes in zip(wanted, payload, strict=True):
        same = routes.dtype == payload[0].dtype and routes.shape[1:] == payload[0].shape[1:]
        if not same or routes.dtype not in ids or routes.ndim != 3:
            found = f"{routes.dtype} {list(routes.shape)}"
            expected = "int16 [rows, L, K] (or int8, uint8), one L, K and dtype"
            raise BatchError(fault(file, f"entry {number}", found, expected))
    return payload


def trainer_config(snapshot: Snapshot) -> dict[str, Any]:
    """The saved GrpoTrainerConfig as nested plain dictionaries."""
    manifest, why = manifest_of(snapshot.path), "the loss settings of the trainer"
    if not manifest.has(layout.PORTABLE_TRAINER):  # exported from an old snapshot without
        raise missing(snapshot.trainer_file, why, NO_TRAINER)
    found = _object(manifest, layout.PORTABLE_TRAINER, why)
    config = found.get("config")
    if not isinstance(config, dict):
        where = snapshot.path / layout.PORTABLE_TRAINER
        raise SnapshotError(fault(where, "config", type(config).__name__, "the loss settings"))
    return config


def grad_info(snapshot: Snapshot, rank: int) -> Any:
    """Figures of global rank ``rank``."""
    name = layout.portable_grad_info(rank)
    why = "per-parameter figures (if the trainer saved them)"
    return manifest_of(snapshot.path).document(name, why)


def grad_info_ranks(snapshot: Snapshot) -> list[int]:
    """Global ranks whose figures were saved."""
    manifest = manifest_of(snapshot.path)
    ranks = range(snapshot.parallel.world_size)
    return [rank for rank in ranks if manifest.has(layout.portable_grad_info(rank))]


def run_config(snapshot: Snapshot) -> str:
    """Text of Megatron-Bridge's ``run_config.yaml``, to the byte."""
    why = "the model's architecture"
    name = layout.PORTABLE_RUN_CONFIG
    lines = _object(manifest_of(snapshot.path), name, why).get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise SnapshotError(
            fault(snapshot.path / name, "lines", type(lines).__name__, "the lines of a YAML text")
        )
    return "\n".join(lines)


def worker_config(snapshot: Snapshot) -> dict[str, Any]:
    """The worker's whole configuration as saved."""
    return _object(manifest_of(snapshot.path), layout.PORTABLE_WORKER, WORKER_IS)


def _object(manifest: Manifest, name: str, why: str) -> dict[str, Any]:
    found: Any = manifest.document(name, why)
    if not isinstance(found, Mapping):
        path: Path = manifest.directory / name
        raise SnapshotError(fault(path, None, f"a JSON {type(found).__name__}", why))
    return dict(found)
