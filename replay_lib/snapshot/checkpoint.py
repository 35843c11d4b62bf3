"""Parameters of a torch_dist checkpoint, read as tensors and nothing else.

Optimizer, RNG, extra and common state are never opened: they are not in the table that this
module works from. Source: Megatron-Core's ``torch_dist`` format over torch's distributed
checkpoint. A portable snapshot's parameters are read through the same table and fragments.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from replay_lib import layout
from replay_lib.errors import SnapshotError, WeightsError, fault
from replay_lib.snapshot.dcp_metadata import Fragment, TensorEntry, read_table
from replay_lib.snapshot.pickles import load_stream


class SafeReader(FileSystemReader):
    """torch's checkpoint reader for directories that nobody vouches for.

    Its metadata holds the model's parameters only, so a load plan that asks for anything else
    finds no such key. Errors are ours; ``torch.distributed.checkpoint.load`` wraps them in a
    CheckpointException, which derives from BaseException.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path))
        self._directory = Path(path)
        self._fragments: dict[MetadataIndex, tuple[TensorEntry, Fragment]] = {}

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The checkpoint's parameters, from the checked table."""
        table = stored_table(self._directory)
        self._fragments = {
            MetadataIndex(entry.key, fragment.offsets): (entry, fragment)
            for entry in table.values()
            for fragment in entry.fragments
        }
        return Metadata(
            state_dict_metadata={key: _described(entry) for key, entry in table.items()},
            storage_data={
                index: _StorageInfo(fragment.name, fragment.start, fragment.length)
                for index, (_entry, fragment) in self._fragments.items()
            },
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the fragments that ``plan`` asks for into the planner's tensors."""
        items = [(*self._fragments[item.storage_index], item) for item in plan.items]
        items.sort(key=lambda each: (each[1].name, each[1].start))
        for entry, fragment, item in items:
            if item.type != LoadItemType.TENSOR:
                raise SnapshotError(fault(self._directory, entry.key, "an object", "a tensor"))
            whole = load_fragment(self._directory, entry, fragment)
            part = whole[_slices(item.storage_offsets, item.lengths)]
            if getattr(planner, "copies_out", False):  # no buffer between file and model
                planner.commit_tensor(item, part)
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _described(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(f.offsets), torch.Size(f.sizes)) for f in entry.fragments
    ]
    return TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks)


def read_tensors(path: str | Path, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole parameters of the checkpoint in directory ``path``, on the CPU, as stored.

    ``keys`` picks some (default: all). Stacked layers stay stacked, ``[layers, ...]``; experts
    too, ``[layers, experts, ...]``. Raises WeightsError naming keys that are not there.
    """
    directory = Path(path)
    table = stored_table(directory)
    wanted = list(table) if keys is None else list(keys)
    absent = sorted(set(wanted) - set(table))
    if absent:
        raise WeightsError(
            fault(
                directory,
                ", ".join(absent),
                "no such parameter in the checkpoint",
                f"one of {len(table)} keys such as {', '.join(sorted(table)[:3])}",
            )
        )
    return {key: _assembled(directory, table[key]) for key in wanted}


def iter_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """As :func:`read_tensors`, one parameter at a time, for models larger than memory."""
    directory = Path(path)
    for key, entry in stored_table(directory).items():
        yield key, _assembled(directory, entry)


def stored_table(directory: Path) -> dict[str, TensorEntry]:
    """Parameters of the snapshot in ``directory`` by key, in either layout; errors as of
    :func:`~replay_lib.snapshot.dcp_metadata.read_table`."""
    if layout.is_portable(directory):
        from replay_lib.snapshot.portable.weights import weights_table

        return weights_table(directory)
    return read_table(directory)


def _assembled(directory: Path, entry: TensorEntry) -> Tensor:
    if len(entry.fragments) == 1:  # it tiles the tensor: it is the tensor
        return load_fragment(directory, entry, entry.fragments[0])
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    filled = torch.zeros(entry.shape, dtype=torch.bool)
    for fragment in entry.fragments:
        here = _slices(fragment.offsets, fragment.sizes)
        whole[here] = load_fragment(directory, entry, fragment)
        filled[here] = True
    if not bool(filled.all()):  # the element counts agree, so chunks overlap
        raise SnapshotError(
            fault(directory, entry.key, "overlapping chunks", "chunks that tile it")
        )
    return whole


def load_fragment(directory: Path, entry: TensorEntry, fragment: Fragment) -> Tensor:
    """One stored chunk, of the shape and dtype that the table states."""
    if layout.is_portable(directory):
        from replay_lib.snapshot.portable.weights import weights_fragment

        return weights_fragment(directory, entry, fragment)
    file = directory / fragment.name
    with file.open("rb") as stream:
        content = _slice(stream, fragment)
    where = f"{file} (bytes {fragment.start} to {fragment.start + fragment.length}: {entry.key})"
    found = load_stream(io.BytesIO(content), where, {})
    stated = f"{_name(entry.dtype)} {list(fragment.sizes)}"
    if not isinstance(found, Tensor):
        raise SnapshotError(fault(where, None, f"a {type(found).__name__}", stated))
    if found.dtype != entry.dtype or tuple(found.shape) != fragment.sizes:
        raise SnapshotError(fault(where, None, f"{_name(found.dtype)} {list(found.shape)}", stated))
    return found.detach()


def _slice(stream: BinaryIO, fragment: Fragment) -> bytes:
    stream.seek(fragment.start)
    return stream.read(fragment.length)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
