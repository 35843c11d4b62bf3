"""Tie the rows of a batch to their routing payloads.

Entry k of a payload belongs to the k-th distinct handle in first-seen order (row, then path,
then handle). Handles are equal iff object, first row and row count are all equal. Payload
entries are already sliced to those rows. Source: AXRL's ``spike_snapshot_routing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib.errors import BatchError, SnapshotError, fault
from replay_lib.snapshot.arrays import array_from
from replay_lib.snapshot.documents import missing
from replay_lib.snapshot.pickles import load_untrusted
from replay_lib.snapshot.stand_ins import StandIn, is_a, routing_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Handle = tuple[Any, int, int | None]  # what identifies the object, first row, number of rows
Paths = list[list[Handle]]  # of one row: one path, or one for each leaf of a prefix tree


def unwrap(value: Any) -> Any:
    """What a tensordict non-tensor wrapper holds, whatever version of tensordict wrote it.

    The list sits under ``data`` somewhere in the wrapper's state, or in ``tensordicts``, one
    wrapper an item, where the wrapper is a stack.
    """
    while is_a(value, "NonTensorData", "NonTensorStack"):
        found = _search(value.state, 4)
        if found is None:
            raise ValueError("a non-tensor column without data")
        value = found[0]
    return value


def _search(state: Any, depth: int) -> tuple[Any] | None:
    if not isinstance(state, dict) or depth == 0:
        return None
    for key in ("data", "tensordicts"):
        if key in state:
            return (state[key],)
    for inner in state.values():
        found = _search(inner, depth - 1)
        if found is not None:
            return found
    return None


def handle_paths(column: Any, rows: int) -> list[Paths | None]:
    """Handles of each row, by path; None for rows without. A ValueError where they are none."""
    column = unwrap(column)
    if column is None:
        return [None] * rows
    if not isinstance(column, list) or len(column) != rows:
        found = f"{len(column)} items" if isinstance(column, list) else type(column).__name__
        raise ValueError(f"{found} for {rows} rows")
    return [_row_paths(item) for item in column]


def _row_paths(row: Any) -> Paths | None:
    row = unwrap(row)
    if row is None:
        return None
    return [[_handle(unwrap(h)) for h in unwrap(path) or ()] for path in row]


def _handle(value: Any) -> Handle:
    if not is_a(value, "TensorHandle") or not isinstance(value.state, dict):
        raise ValueError(f"a {type(value).__name__} where a handle belongs")
    state = value.state
    ref = state.get("ref")
    if isinstance(ref, StandIn):  # a dead object: only equality matters
        ref = ref.args
    start, count = state.get("row_start", 0), state.get("row_count")
    if not isinstance(start, int) or not isinstance(count, int | None):
        raise ValueError(f"a handle with rows {start!r:.40} and {count!r:.40}")
    return ref, start, count


def distinct(rows: Sequence[Paths | None]) -> list[Handle]:
    """Distinct handles in first-seen order."""
    seen = {handle: None for paths in rows if paths for path in paths for handle in path}
    return list(seen)


def read_payload(path: Path) -> list[Tensor]:
    """Arrays of a routing payload, each ``[rows, L, K]`` (as stored, already sliced).

    int16, or int8 or uint8 where the trainer stored those: a narrow type may have wrapped large
    ids, and only its name tells. All entries have one shape of a row and one dtype.
    """
    import torch

    found = load_untrusted(path, routing_table(), "the routing payloads of the batch's handles")
    if not isinstance(found, list):
        raise SnapshotError(fault(path, None, type(found).__name__, "a list of arrays"))
    payload: list[Tensor] = []
    for index, item in enumerate(found):
        try:
            array = ids_from(item)
        except (ValueError, TypeError) as error:
            raise BatchError(
                fault(path, f"entry {index}", str(error), "an integer array [rows, L, K]")
            ) from error
        if payload and array.shape[1:] != payload[0].shape[1:]:
            layers, topk = payload[0].shape[1:]
            raise BatchError(
                fault(
                    path,
                    f"entry {index}",
                    f"{list(array.shape)}",
                    f"[rows, {layers}, {topk}] as in entry 0",
                )
            )
        if payload and payload[0].dtype != (dtype := torch.from_numpy(array).dtype):
            found, expected = str(dtype), f"{payload[0].dtype} as in entry 0"
            raise BatchError(fault(path, f"entry {index}", found, expected))
        payload.append(torch.from_numpy(array))
    return payload


def ids_from(value: Any) -> NDArray[np.integer[Any]]:
    """A stand-in's array of three axes, as int16 where it is as wide or wider.

    Narrower ones stay as they are. A ValueError where anything would be lost.
    """
    import numpy as np

    array: Any = array_from(value)  # the reductions of numpy 2.5 have types of their own
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ValueError(f"{array.dtype} {list(array.shape)}")
    if array.dtype.itemsize == 1:
        return array  # type: ignore[no-any-return]
    bounds = np.iinfo(np.int16)
    if array.size:
        lowest, highest = int(np.min(array)), int(np.max(array))
        if not (bounds.min <= lowest and highest <= bounds.max):
            raise ValueError(f"ids from {lowest} to {highest}, beyond int16")
    narrowed: NDArray[np.integer[Any]] = array.astype(np.int16)
    return narrowed


def payload_by_handle(
    rows: Sequence[Paths | None], payload: Sequence[Tensor] | None, file: Path, *, lost: bool
) -> dict[Handle, Tensor]:
    """Routes of each distinct handle, int16 ``[n, L, K]``.

    ``payload`` are those of ``file``, None where there is no such file; ``lost`` says that the
    trainer may never have written it. Raises IncompleteSnapshotError where there are handles and
    no payload file, and BatchError with both counts where they differ in number.
    """
    handles = distinct(rows)
    if payload is None:
        if handles:
            why = f"payloads of the batch's {len(handles)} handles"
            raise missing(file, why, _LOST) if lost else missing(file, why)
        return {}
    if len(payload) != len(handles):
        raise BatchError(
            fault(
                file,
                None,
                f"{len(payload)} routing payloads",
                f"one for each of the batch's {len(handles)} distinct handles",
                "The two files are not of the same step: copy both again.",
            )
        )
    return dict(zip(handles, payload, strict=True))


_LOST = (
    "Old versions of the trainer did not save routes; they ended with the run, and the step cannot "
    "be replayed as it was. What the snapshot states can still be looked at, and its weights read"
)


def tie(rows: Sequence[Paths | None], payload: dict[Handle, Tensor]) -> list[list[Tensor] | None]:
    """Routes of each row by path, a path's handles joined; None for rows without handles."""
    return [None if paths is None else [_joined(path, payload) for path in paths] for paths in rows]


def _joined(path: list[Handle], payload: dict[Handle, Tensor]) -> Tensor:
    import torch

    if path:
        return torch.cat([payload[handle] for handle in path])
    layers, topk = next((tuple(t.shape[1:]) for t in payload.values()), (0, 0))
    return torch.empty(0, layers, topk, dtype=torch.int16)


def plain_tree(value: Any) -> dict[str, Any] | None:
    """A PrefixMergeInfo stand-in as plain data, its arrays as tensors."""
    value = unwrap(value)
    if value is None:
        return None
    if not is_a(value, "PrefixMergeInfo") or not isinstance(value.state, dict):
        raise ValueError(f"a {type(value).__name__} where a prefix tree belongs")
    return {str(key): _plain(item) for key, item in value.state.items()}


def _plain(value: Any) -> Any:
    import torch

    if is_a(value, "_reconstruct"):
        return torch.from_numpy(array_from(value))
    if isinstance(value, StandIn):
        state = value.state if isinstance(value.state, dict) else {}
        return {str(key): _plain(item) for key, item in state.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value
