"""Read a torch_dist checkpoint's ``.metadata`` without letting it name anything but data.

The file is a bare pickle that torch's own reader loads without restriction. Here every class it
may name is replaced by a stand-in, and the values are checked: file names must stay inside the
directory, fragments inside their files, and chunks must tile their tensor.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.errors import IncompleteSnapshotError, SnapshotError, SpikeReplayError, fault
from replay_lib.snapshot.documents import COPY_AGAIN, missing
from replay_lib.snapshot.pickles import python3_name, unsafe
from replay_lib.snapshot.stand_ins import Table, is_a, stand_ins

if TYPE_CHECKING:
    import torch

Index = tuple[int, ...]

_TABLE_NAMES = (
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in [
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ]
    ),
    *(
        f"torch.distributed.checkpoint.planner.{name}"
        for name in [
            "SavePlan",
            "WriteItem",
            "WriteItemType",
            "TensorWriteData",
            "BytesIOWriteData",
        ]
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
)
_DTYPES = frozenset(
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
)
_WHY = "the table of the checkpoint's tensors"


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Where one chunk of a tensor lies: ``length`` bytes from ``start`` of file ``name``."""

    offsets: Index
    sizes: Index
    name: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One global tensor of the checkpoint. ``fragments`` tile it exactly."""

    key: str
    dtype: torch.dtype
    shape: Index
    fragments: tuple[Fragment, ...]


def is_model_key(key: str) -> bool:
    """Whether a key names a parameter: not optimizer, RNG, extra or common state."""
    parts = key.split("/", maxsplit=1)[0].split(".")
    others = {"optimizer", "_extra_state", "rng_state", "common_state", "rerun_state_machine_state"}
    return not others.intersection(parts)


def read_table(directory: Path) -> dict[str, TensorEntry]:
    """Parameters of the checkpoint in ``directory`` by key; other entries are left out.

    Raises UnsafePickleError, IncompleteSnapshotError where a fragment's file is missing or too
    short, and SnapshotError where the table contradicts itself.
    """
    path = directory / layout.DCP_METADATA
    if not path.is_file():
        raise missing(path, _WHY)
    try:
        root = _Unpickler(path).load()
        entries = dict(_entries(root, path))
    except SpikeReplayError:
        raise
    except Exception as error:  # whatever a corrupt file provokes ends as our error
        first = (str(error).splitlines() or [""])[0][:120]
        found = f"broken bytes ({type(error).__name__}: {first})"
        raise SnapshotError(fault(path, None, found, _WHY, f"{COPY_AGAIN}.")) from error
    _check_files(directory, path, entries)
    return entries


# The pure-Python unpickler: the C one lets a short file ask for a memo of many gigabytes.
class _Unpickler(pickle._Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path
        self._table: Table = stand_ins(_TABLE_NAMES)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _Dtype(name)
        full_name = python3_name(module, name)
        if full_name not in self._table:
            raise unsafe(self._path, full_name)
        return self._table[full_name]

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("a persistent id in a bare pickle")


class _Dtype(str):
    """Name of a dtype, told apart from any string of the file."""


def _entries(root: Any, path: Path) -> Iterator[tuple[str, TensorEntry]]:
    if not is_a(root, "Metadata"):
        raise ValueError(f"a {type(root).__name__} where checkpoint metadata belongs")
    stored = _storage(root.state["storage_data"], path)
    for key, described in root.state["state_dict_metadata"].items():
        if is_a(described, "TensorStorageMetadata") and is_model_key(key):
            yield key, _entry(key, described.state, stored.get(key, {}))


def _storage(raw: dict[Any, Any], path: Path) -> dict[str, dict[Index, tuple[str, int, int]]]:
    """File name, first byte and length by key and chunk offset; every name is checked."""
    stored: dict[str, dict[Index, tuple[str, int, int]]] = {}
    for index, info in raw.items():
        key, offset = index.state["fqn"], index.state.get("offset")
        name, start, length = (info.state[k] for k in ("relative_path", "offset", "length"))
        _check_name(name, path)
        if info.state.get("transform_descriptors"):
            raise ValueError(f"{key} is stored through {info.state['transform_descriptors']}")
        if not _whole(start) or not _whole(length):
            raise ValueError(f"{key} lies at byte {start!r}, length {length!r}")
        if offset is not None:
            stored.setdefault(key, {})[_index(offset)] = (name, start, length)
    return stored


def _check_name(name: Any, path: Path) -> None:
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    plain = bool(parts) and ".." not in parts and not name.startswith("/")
    if not plain or "\\" in name or "\0" in name:
        raise SnapshotError(
            fault(
                path,
                "relative_path",
                repr(name)[:80],
                "the name of a file inside the snapshot",
                "Nothing was read from there. Do not load this checkpoint with other tools.",
            )
        )


def _entry(
    key: str, state: dict[str, Any], stored: dict[Index, tuple[str, int, int]]
) -> TensorEntry:
    import torch

    shape, name = _index(state["size"]), state["properties"].state[0]
    if not isinstance(name, _Dtype):
        raise ValueError(f"{key} has dtype {name!r:.40}")
    fragments = []
    for chunk in state["chunks"]:
        offsets, sizes = _index(chunk.state["offsets"]), _index(chunk.state["sizes"])
        if offsets not in stored:
            raise ValueError(f"{key} has a chunk at {offsets} that is stored nowhere")
        file, start, length = stored[offsets]
        fragments.append(
            Fragment(offsets=offsets, sizes=sizes, name=file, start=start, length=length)
        )
    _check_tiling(key, shape, fragments)
    return TensorEntry(key=key, dtype=getattr(torch, name), shape=shape, fragments=tuple(fragments))


def _check_tiling(key: str, shape: Index, fragments: list[Fragment]) -> None:
    """Chunks inside the tensor, all at different offsets, as many elements as the tensor.

    Overlap is caught when the tensor is assembled, element by element.
    """
    inside = all(
        len(f.offsets) == len(f.sizes) == len(shape)
        and all(o + n <= s for o, n, s in zip(f.offsets, f.sizes, shape, strict=True))
        for f in fragments
    )
    elements = sum(math.prod(f.sizes) for f in fragments)
    if (
        not inside
        or elements != math.prod(shape)
        or len({f.offsets for f in fragments}) != len(fragments)
    ):
        raise ValueError(f"{key} of shape {shape} has chunks that do not tile it")


def _index(value: Any) -> Index:
    """A torch.Size of the file as integers >= 0."""
    items = value.args[0] if is_a(value, "Size") and value.args else ()
    if not is_a(value, "Size") or not all(_whole(n) for n in items):
        raise ValueError(f"{value!r:.60} where a shape belongs")
    return tuple(items)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_files(directory: Path, path: Path, entries: dict[str, TensorEntry]) -> None:
    ends: dict[str, int] = {}
    for entry in entries.values():
        for fragment in entry.fragments:
            end = fragment.start + fragment.length
            ends[fragment.name] = max(ends.get(fragment.name, 0), end)
    for name, end in sorted(ends.items()):
        file = directory / name
        if not file.is_file():
            raise missing(file, f"tensors that {path.name} places there")
        size = file.stat().st_size
        if size < end:
            raise IncompleteSnapshotError(
                fault(file, None, f"{size} bytes", f"{end} bytes or more", f"{COPY_AGAIN}.")
            )
