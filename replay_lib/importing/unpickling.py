"""Pickles of verl read without running anything: an allow-list, inert stand-ins, plain data."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib.errors import SnapshotError, SpikeReplayError, UnsafePickleError, fault
from replay_lib.importing.values import numpy_table
from replay_lib.snapshot.pickles import broken, load_stream, python3_name
from replay_lib.snapshot.stand_ins import StandIn, Table, is_a, stand_ins

if TYPE_CHECKING:
    from torch import Tensor

_OWN = ("verl.protocol.DataProto",)
_CONSOLIDATED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
_TENSORDICT = (
    _CONSOLIDATED,
    "tensordict._reductions._make_td",
    "tensordict._td.TensorDict",
    "tensordict._td.LazyStackedTensorDict",
)
#: dtypes of a consolidated TensorDict, by the names that it has for them.
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")


def load_plain_pickle(path: Path) -> Any:
    """The object of a bare pickle; UnsafePickleError names a global that no DataProto names."""
    try:
        return _Unpickler(path, stand_ins(_OWN) | numpy_table()).load()
    except SpikeReplayError:
        raise
    except Exception as error:  # whatever a corrupt file provokes ends as our error
        first = (str(error).splitlines() or [""])[0][:100]
        found = f"broken bytes ({type(error).__name__}: {first})"
        raise SnapshotError(fault(path, None, found, "a pickled DataProto")) from error


# The pure-Python unpickler: the C one lets a short file ask for a memo of many gigabytes.
class _Unpickler(pickle._Unpickler):
    def __init__(self, path: Path, table: Table) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path, self._table = path, table

    def find_class(self, module: str, name: str) -> Any:
        full_name = python3_name(module, name)
        if full_name not in self._table:
            raise UnsafePickleError(
                fault(
                    self._path,
                    None,
                    f"a pickle that asks for {full_name}",
                    "only what a DataProto of tensors, texts and numbers holds",
                    "Nothing of it was run. Do not load this file with other tools unless you "
                    "know who wrote it.",
                )
            )
        return self._table[full_name]


def load_tensor_dict(content: bytes, where: str) -> dict[str, Tensor]:
    """Tensors of a saved TensorDict, consolidated (one storage) or not, by name.

    Nested and other columns are left out. SnapshotError where it is no such thing.
    """
    found = load_stream(io.BytesIO(content), where, stand_ins(_TENSORDICT))
    if is_a(found, "_rebuild_tensordict_files_consolidated") and len(found.args) == 2:
        return _consolidated(found.args[0], found.args[1], where)
    if is_a(found, "_make_td") and len(found.args) == 2:
        return _tensors(found.args[1])
    if is_a(found, "TensorDict"):
        return _tensors(found.state)
    kind = found.pickled_as if isinstance(found, StandIn) else type(found).__name__
    raise SnapshotError(fault(where, None, f"a {kind}", "a TensorDict"))


def _tensors(state: Any) -> dict[str, Tensor]:
    import torch

    columns = state.get("_tensordict") if isinstance(state, dict) else None
    columns = columns if isinstance(columns, dict) else {}
    return {str(k): v for k, v in columns.items() if isinstance(v, torch.Tensor)}


def _consolidated(described: Any, storage: Any, where: str) -> dict[str, Tensor]:
    """Leaves are ``(dtype, shape, first byte, last byte, padding)`` of one uint8 storage."""
    import torch

    leaves = described.get("leaves") if isinstance(described, dict) else None
    if not isinstance(leaves, dict) or not isinstance(storage, torch.Tensor):
        raise SnapshotError(fault(where, "leaves", f"a {type(leaves).__name__}", "a table"))
    if storage.dtype != torch.uint8 or storage.dim() != 1:
        raise SnapshotError(fault(where, "storage", f"{storage.dtype}", "a row of bytes"))
    return {str(name): _leaf(f"{where}: {name}", leaf, storage) for name, leaf in leaves.items()}


def _leaf(where: str, leaf: Any, storage: Tensor) -> Tensor:
    import torch

    try:
        kind, shape, start = str(leaf[0]), [int(n) for n in leaf[1]], int(leaf[2])
        name = kind.removeprefix("torch.")
        if name not in (*_DTYPES, "bool") or start < 0 or any(n < 0 for n in shape):
            raise ValueError(f"{kind:.40} {shape} at {start}")
        dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        if start + size > storage.numel():
            raise ValueError(f"{size} bytes at {start} of {storage.numel()}")
    except (TypeError, ValueError, IndexError) as error:
        raise broken(where, f"a leaf that cannot be: {error}") from error
    return storage[start : start + size].clone().view(dtype).view(shape)
