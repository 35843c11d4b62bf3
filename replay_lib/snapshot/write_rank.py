"""Write what one rank saves: batch with handles, routing payload, trainer.

The pickles name AXRL's classes and have the states that AXRL's own objects would have
(tensordict 0.15, pydantic 2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.errors import BatchError, fault
from replay_lib.merged import MergedRow
from replay_lib.snapshot.naming import Call, Instance, named, save_named
from replay_lib.snapshot.routes import Handle, Paths

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.loss.settings import GrpoSettings


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedHandle:
    """A handle with the routes it stands for.

    ``ref`` identifies the stored object (28 bytes in ray, or any text). ``rows`` is int16
    ``[n, L, K]``, already sliced to ``row_start`` and ``row_count``.
    """

    ref: bytes | str
    rows: Tensor
    row_start: int = 0
    row_count: int | None = None

    @property
    def key(self) -> tuple[bytes | str, int, int | None]:
        """Handles with equal keys are one handle."""
        return self.ref, self.row_start, self.row_count


RowHandles = tuple[tuple[SavedHandle, ...], ...]  # paths of handles


def object_ref(*parts: int | str) -> bytes:
    """28 bytes that identify an object, the length of a ray object id."""
    return hashlib.sha224(repr(parts).encode()).digest()


def handles_of(batch: RankBatch) -> tuple[RowHandles | None, ...]:
    """One handle a path; rows that share one route tensor share one handle."""
    made: dict[int, SavedHandle] = {}

    def handle(rows: Tensor) -> SavedHandle:
        ref = object_ref(batch.dp_rank, len(made))
        return made.setdefault(id(rows), SavedHandle(ref=ref, rows=rows))

    merged: Sequence[Any] = batch.merge_info or (None,) * batch.rows
    routes = batch.routes or (None,) * batch.rows
    found: list[RowHandles | None] = []
    for route, tree in zip(routes, merged, strict=True):
        paths = tree.path_routes if isinstance(tree, MergedRow) else ()
        paths = paths or (() if route is None else (route,))
        found.append(tuple((handle(path),) for path in paths) if paths else None)
    return tuple(found)


def saved_rows(
    rows: Sequence[Paths | None], payload: Mapping[Handle, Tensor]
) -> tuple[RowHandles | None, ...]:
    """Handles as they were read, with their routes, ready to be written."""

    def saved(handle: Handle) -> SavedHandle:
        ref, start, count = handle
        identity = ref[0] if isinstance(ref, tuple) else ref
        return SavedHandle(ref=identity, rows=payload[handle], row_start=start, row_count=count)

    return tuple(
        None if paths is None else tuple(tuple(map(saved, path)) for path in paths)
        for paths in rows
    )


def write_batch(path: Path, batch: RankBatch, handles: Sequence[RowHandles | None]) -> None:
    """A batch file; columns that are None are absent, as with AXRL's optional ones."""
    columns: dict[str, Any] = {}
    for name in (*ROW_COLUMNS, *TOKEN_COLUMNS):
        value = getattr(batch, name)
        if value is not None:
            columns[name] = value.contiguous().clone()
    if batch.merge_info is not None:
        columns["merge_info"] = _non_tensor([_tree(row) for row in batch.merge_info], batch.rows)
    if any(row is not None for row in handles):
        shared: dict[Any, Instance] = {}
        rows = [None if row is None else _paths(row, shared) for row in handles]
        columns["routing_handles_per_path"] = _non_tensor(rows, batch.rows)
    save_named(_tensor_dict("axrl.data.sample.SampleTensorDict", columns, batch.rows), path)


def distinct_handles(handles: Sequence[RowHandles | None]) -> list[SavedHandle]:
    """Distinct handles in first-seen order; a BatchError where equal ones differ in routes."""
    seen: dict[Any, SavedHandle] = {}
    for row in handles:
        for handle in (handle for path in row or () for handle in path):
            first = seen.setdefault(handle.key, handle)
            if first is not handle and not first.rows.equal(handle.rows):
                raise BatchError(
                    fault("routing handles", repr(handle.ref), "two sets of routes", "one")
                )
    return list(seen.values())


def write_routing(path: Path, handles: Sequence[RowHandles | None]) -> int:
    """A routing payload, and the number of its entries; no file where that is 0."""
    import torch

    narrow = (torch.int8, torch.uint8)  # kept: ids may have wrapped, and only the dtype tells
    payload = [
        (h.rows if h.rows.dtype in narrow else h.rows.to(torch.int16)).numpy().copy()
        for h in distinct_handles(handles)
    ]
    if payload:
        save_named(payload, path)
    return len(payload)


def write_trainer(
    path: Path, settings: GrpoSettings, saved: Mapping[str, Any] | None = None
) -> None:
    """``trainer.pt``: AXRL's GrpoTrainer with these settings.

    ``saved`` are recorded settings as plain dictionaries: what ``settings`` do not know, those of
    a newer trainer, is kept from there.
    """
    config = _pydantic("GrpoTrainerConfig", _over(saved or {}, settings.model_dump()))
    save_named(Instance(named("axrl.trainer.grpo_trainer.GrpoTrainer"), {"config": config}), path)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``, group by group."""
    both = {
        key: _over(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict)
        else value
        for key, value in above.items()
    }
    return {**below, **both}


_CONFIG_OF_FIELD = {
    "entropy_control": "EntropyControlConfig",
    "opd": "OPDConfig",
    "ppo_value": "PPOValueConfig",
    "sglang_worker": "RolloutWorkerConfig",
    "teacher_model": "ModelConfig",
    "model": "ModelConfig",
    "sampling_config": "SamplingConfig",
}


def _pydantic(name: str, fields: dict[str, Any]) -> Instance:
    """The state of a pydantic 2 object; nested objects by AXRL's field names."""
    values = {
        key: _pydantic(_CONFIG_OF_FIELD[key], value)
        if isinstance(value, dict) and key in _CONFIG_OF_FIELD
        else value
        for key, value in fields.items()
    }
    state = {
        "__dict__": values,
        "__pydantic_extra__": None,
        "__pydantic_fields_set__": set(fields),
        "__pydantic_private__": None,
    }
    return Instance(named(f"axrl.configs.{name}"), state)


def _state(columns: dict[str, Any], rows: int) -> dict[str, Any]:
    import torch

    return {
        "_tensordict": columns,
        "_batch_size": torch.Size([rows]),
        "_device": None,
        "_td_dim_names": None,
    }


def _tensor_dict(name: str, columns: dict[str, Any], rows: int) -> Instance:
    return Instance(named(name), _state(columns, rows))


def _non_tensor(data: list[Any], rows: int) -> Instance:
    empty = Call(
        named("tensordict._reductions._make_td"),
        (named("tensordict._td.TensorDict"), _state({}, rows)),
    )
    content = {"data": data, "_metadata": None, "_is_non_tensor": True}
    state = {"tensordict": empty, "non_tensordict": content}
    return Instance(named("tensordict.tensorclass.NonTensorData"), state)


def _paths(row: RowHandles, shared: dict[Any, Instance]) -> list[list[Instance]]:
    return [[_handle(handle, shared) for handle in path] for path in row]


def _handle(handle: SavedHandle, shared: dict[Any, Instance]) -> Instance:
    if handle.key not in shared:
        state = {
            "ref": handle.ref if isinstance(handle.ref, str) else _object_ref(handle.ref),
            "row_start": handle.row_start,
            "row_count": handle.row_count,
        }
        shared[handle.key] = Instance(named("axrl.utils.tensor_store.TensorHandle"), state)
    return shared[handle.key]


def _object_ref(ref: bytes) -> Call:
    return Call(named("ray.ObjectRef"), (ref,))


def _tree(row: Any) -> Instance | None:
    tree = row.tree if isinstance(row, MergedRow) else None
    if tree is None:
        return None
    prefix = "axrl.utils.megatron.prefix_tree"
    state = {key: _array_or_plain(value) for key, value in tree.items()}
    state["nodes"] = [Instance(named(f"{prefix}.PrefixTreeNode"), dict(n)) for n in tree["nodes"]]
    return Instance(named(f"{prefix}.PrefixMergeInfo"), state)


def _array_or_plain(value: Any) -> Any:
    import torch

    return value.numpy().copy() if isinstance(value, torch.Tensor) else value
