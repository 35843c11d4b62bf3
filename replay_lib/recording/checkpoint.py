"""Weights into a ``torch_dist`` checkpoint, piece by piece, by all ranks of a job at once.

A piece is a view of a live parameter and its place in a whole tensor of the checkpoint. Pieces that
several ranks hold are written once, by whom has least to write. Beside the live weights no more
than one piece is ever held. Source: torch's distributed checkpoint planner, and Megatron-Core's
``torch_dist`` format, which Megatron reads with the same reader.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from replay_lib import layout
from replay_lib.errors import WeightsError, fault
from replay_lib.recording.ranks import Ranks
from replay_lib.snapshot.naming import save_named
from replay_lib.snapshot.write_checkpoint import BACKEND, CheckpointWriter


@dataclass(frozen=True, eq=False)
class Piece:
    """``view`` is the part at ``offset`` of the whole tensor ``key`` of shape ``whole``.

    It has one axis for each of the whole tensor's (a leading layer axis of length 1 where layers
    are stacked) and shares memory with a live parameter.
    """

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    view: Tensor

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape: what two ranks that hold the same piece have in common."""
        return self.offset, tuple(self.view.shape)


@dataclass(frozen=True)
class Blob:
    """A byte object of the checkpoint: what Megatron's loader asks for beside the parameters."""

    key: str
    content: bytes


#: Of a piece: key, shape of the whole tensor, offset and shape of the part, dtype.
Placed = tuple[str, tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]], str]


def gathered_places(ranks: Ranks, pieces: Iterable[Piece | Blob]) -> list[Placed]:
    """Where the pieces of all ranks lie; no weight is looked at. All ranks call this."""
    own = [(p.key, p.whole, p.box, str(p.view.dtype)) for p in pieces if isinstance(p, Piece)]
    return [entry for told in ranks.gathered(own) for entry in told]


def check_places(places: Iterable[Placed]) -> str:
    """What is wrong with the weights that all ranks would write, "" if nothing."""
    boxes: dict[str, set[Any]] = {}
    kinds: dict[str, set[Any]] = {}
    for key, whole, box, dtype in places:
        boxes.setdefault(key, set()).add(box)
        kinds.setdefault(key, set()).add((whole, dtype))
    if not boxes:
        return fault("weights", None, "no parameter", "those of the model")
    for key, found in kinds.items():
        if len(found) > 1:
            told = " and ".join(sorted(f"{d.removeprefix('torch.')} {list(w)}" for w, d in found))
            return fault("weights", key, told, "one shape and dtype on all ranks")
        ((whole, _),) = found
        wrong = _wrong_places(whole, boxes[key])
        if wrong:
            return fault("weights", key, wrong, f"pieces that tile {list(whole)}")
    return ""


def _wrong_places(whole: tuple[int, ...], boxes: set[Any]) -> str:
    """Pieces outside, or too few or many elements; torch looks for overlaps when it writes."""
    for offset, sizes in boxes:
        inside = len(offset) == len(sizes) == len(whole) and all(
            start >= 0 and start + size <= length
            for start, size, length in zip(offset, sizes, whole, strict=True)
        )
        if not inside:
            return f"a piece of {list(sizes)} at {list(offset)}, which lies outside"
    missing = math.prod(whole) - sum(math.prod(sizes) for _, sizes in boxes)
    return f"{abs(missing)} elements too {'few' if missing > 0 else 'many'}" if missing else ""


def save_pieces(
    directory: Path, name: str, step: int, pieces: Iterable[Piece | Blob], ranks: Ranks
) -> None:
    """Write the weights of all ranks into the existing ``directory``; all ranks call this.

    ``name`` is what the checkpoint calls itself. Rank 0 adds Megatron's ``common.pt`` and then
    ``metadata.json``. Raises WeightsError on every rank where one of them failed.
    """
    try:
        with warnings.catch_warnings():
            # torch says that no process group is there; that is what is asked for
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                {},
                storage_writer=CheckpointWriter(directory, name),
                planner=_Planner(pieces),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:  # derives from BaseException
        first = next(iter(error.failures.values()))[0]
        raise WeightsError(f"{directory}: the weights were not written: {first}") from error
    if ranks.rank == 0:
        common = {"checkpoint_version": 3.0, "iteration": step}
        save_named(common, directory / layout.COMMON)
        text = json.dumps(BACKEND)
        (directory / layout.MEGATRON_METADATA).write_text(text, encoding="utf-8")


class _Planner(DefaultSavePlanner):
    """torch's planner over pieces instead of a state dictionary."""

    def __init__(self, pieces: Iterable[Piece | Blob]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(index, piece) for index, piece in self._pieces.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        piece = self._pieces[MetadataIndex(index.fqn, index.offset)]
        return piece.view.detach() if isinstance(piece, Piece) else io.BytesIO(piece.content)


def _index(piece: Piece | Blob) -> MetadataIndex:
    if isinstance(piece, Blob):
        return MetadataIndex(piece.key)
    return MetadataIndex(piece.key, torch.Size(piece.offset))


def _item(index: MetadataIndex, piece: Piece | Blob) -> WriteItem:
    if isinstance(piece, Blob):
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(piece.offset), piece.view.shape),
        properties=TensorProperties(dtype=piece.view.dtype),
        size=torch.Size(piece.whole),
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)
