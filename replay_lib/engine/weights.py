"""Read weights, and nothing else, from a ``torch_dist`` checkpoint into the live model.

Megatron's own loader unpickles ``_extra_state`` objects without restriction, so it is not used.
The model says which slice of which checkpoint tensor each of its tensors is (its
``sharded_state_dict``); the tensors are then read through ``torch.distributed.checkpoint`` with
the snapshot's safe reader. Optimizer, RNG, extra and common state are never opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)

from replay_lib.errors import WeightsError
from replay_lib.snapshot.checkpoint import SafeReader

#: Checkpoint entries that are not the model's parameters.
NOT_MODEL = ("optimizer.", "rng_state", "common_state", "opt_param_scheduler", "rerun_state")
LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"

#: The MoE pre-norm has its own name in Transformer Engine's specs (production) and another one
#: in Megatron's local spec; both are read.
PRE_NORM = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


@dataclass(frozen=True)
class Slice:
    """One live tensor and the place of a whole checkpoint tensor that it mirrors.

    ``view`` has one axis for each axis of the checkpoint tensor (leading layer and expert axes of
    length 1), and shares memory with the parameter ``owner`` (Megatron's module name).
    """

    owner: str
    key: str
    offset: tuple[int, ...]
    view: Tensor
    whole: tuple[int, ...]


def model_slices(module: torch.nn.Module) -> list[Slice]:
    """Every parameter (and persistent buffer) of the model as slices of checkpoint tensors."""
    state = module.sharded_state_dict(metadata={"singleton_local_shards": False})  # type: ignore[operator]
    slices: list[Slice] = []
    for owner, entry in state.items():
        slices.extend(_slices(owner, entry))
    return slices


def _slices(owner: str, entry: Any) -> Iterator[Slice]:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(entry, ShardedTensorFactory):
        built = entry.build()
        for part in built.values() if isinstance(built, dict) else built:
            yield from _slices(owner, part)
    elif isinstance(entry, ShardedTensor):
        data = entry.data.detach()
        lead = (1,) * (len(entry.global_shape) - data.dim())
        yield Slice(
            owner, entry.key, entry.global_offset, data.view(lead + data.shape), entry.global_shape
        )


def is_stacked(key: str) -> bool:
    """Whether the checkpoint tensor ``key`` holds all layers, one behind the other."""
    return key.startswith(LAYERS) and not key[len(LAYERS)].isdigit()


def canonical_names(slices: list[Slice]) -> dict[str, str]:
    """Parameter names as production runs print them, by Megatron's module name.

    ``decoder.layers.<i>.self_attention.linear_qkv.layer_norm_weight`` and the like, whatever this
    engine's own modules are called.
    """
    names: dict[str, str] = {}
    for piece in slices:
        key = piece.key.replace("experts.experts.", "experts.")
        if is_stacked(key):
            key = f"{LAYERS}{piece.offset[0]}.{key[len(LAYERS) :]}"
        names[piece.owner] = key
    return names


def vocab_rows(index: Metadata, where: Path) -> int:
    """Rows of the embedding in the checkpoint (the saved ``vocab_size`` may be unpadded)."""
    entry = index.state_dict_metadata.get(EMBEDDING)
    if not isinstance(entry, TensorStorageMetadata):
        raise WeightsError(f"{where}: the checkpoint has no tensor {EMBEDDING}; is it a model's?")
    return int(entry.size[0])


Gather = Callable[[Any], list[Any]]  # a plain value of every rank, on every rank


CHECK_RUN = "Check run_config.yaml against the run, or the snapshot against its source"


def load_weights(
    module: torch.nn.Module,
    checkpoint: Path,
    gather: Gather = lambda value: [value],
    then: str = CHECK_RUN,
) -> list[Slice]:
    """Fill ``module`` from the checkpoint in ``checkpoint``; returns the slices it is made of.

    Names are compared as sets and shapes exactly, before anything is read: a missing, extra or
    misshapen tensor is one WeightsError that names all of them. ``gather`` brings the names of all
    ranks together where the module is a shard (``Comm.gather``); each rank reads its own slices,
    whatever layout wrote them. Values are cast to the model's dtype where it differs (float32
    replay of bfloat16 weights); parameters of whole numbers are one WeightsError too. ``then``:
    what to do where they differ.
    """
    reader = SafeReader(checkpoint)
    index = reader.read_metadata()
    saved = {
        key: tuple(entry.size)
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(NOT_MODEL)
    }
    slices = [_renamed(piece, saved) for piece in model_slices(module)]
    _compare(gather({piece.key: tuple(piece.whole) for piece in slices}), saved, checkpoint, then)
    _refuse_integers(index, saved, checkpoint, then)
    plan = _Planner(slices)
    reader.set_up_storage_reader(index, is_coordinator=True)
    with torch.no_grad():
        reader.read_data(plan.plan(index), plan).wait()
    return slices


def _renamed(piece: Slice, saved: Mapping[str, Any]) -> Slice:
    if piece.key in saved:
        return piece
    for own, other in (PRE_NORM, PRE_NORM[::-1]):
        key = piece.key.replace(own, other)
        if own in piece.key and key in saved:
            return Slice(piece.owner, key, piece.offset, piece.view, piece.whole)
    return piece


def _compare(
    shards: list[dict[str, tuple[int, ...]]],
    saved: Mapping[str, tuple[int, ...]],
    where: Path,
    then: str,
) -> None:
    wanted = {key: shape for shard in shards for key, shape in shard.items()}
    problems = [f"missing in the checkpoint: {key}" for key in sorted(wanted.keys() - saved.keys())]
    problems += [f"unknown to the model: {key}" for key in sorted(saved.keys() - wanted.keys())]
    problems += [
        f"{key} has shape {list(saved[key])}, the model wants {list(wanted[key])}"
        for key in sorted(wanted.keys() & saved.keys())
        if saved[key] != wanted[key]
    ]
    if problems:
        raise WeightsError(
            f"{where}: checkpoint and model differ, nothing was replayed: "
            + "; ".join(problems)
            + f". {then}."
        )


def _refuse_integers(
    index: Metadata, saved: Mapping[str, tuple[int, ...]], where: Path, then: str
) -> None:
    """WeightsError that names every parameter that is no floating point: a cast would hide it."""
    odd = [
        f"{key} is {entry.properties.dtype}"
        for key, entry in sorted(index.state_dict_metadata.items())
        if key in saved
        and isinstance(entry, TensorStorageMetadata)
        and not entry.properties.dtype.is_floating_point
    ]
    if odd:
        told = "; ".join(odd).replace("torch.", "")
        raise WeightsError(
            f"{where}: parameters that are no floating point, nothing was replayed: {told}. {then}."
        )


@dataclass(frozen=True)
class _Part:
    """Where a stored chunk and a live slice overlap, in the axes of each."""

    view: Tensor
    inside: tuple[slice, ...]  # of the slice's view
    stored: tuple[slice, ...]  # of the chunk


class _Planner(LoadPlanner):
    """Reads every stored chunk once and copies it to all slices that it overlaps.

    torch's own planner reads a chunk anew for each slice: a checkpoint that holds all layers and
    experts of a parameter in one chunk would be read once a layer.
    """

    copies_out = True  # what is committed is copied at once, so a chunk needs no buffer of its own

    def __init__(self, slices: list[Slice]) -> None:
        self.slices: dict[str, list[Slice]] = {}
        for piece in slices:
            self.slices.setdefault(piece.key, []).append(piece)
        self.parts: dict[MetadataIndex, list[_Part]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def plan(self, index: Metadata) -> LoadPlan:
        """One item for each stored chunk that some slice needs."""
        items: list[ReadItem] = []
        for key, wanted in self.slices.items():
            entry = index.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            self.dtypes[key] = entry.properties.dtype
            for number, chunk in enumerate(entry.chunks):
                place = MetadataIndex(key, chunk.offsets, number)
                parts = [part for s in wanted if (part := _overlap(s, chunk)) is not None]
                if parts:
                    self.parts[place] = parts
                    items.append(_read_item(place, chunk))
        self._check_complete()
        return LoadPlan(items)

    def _check_complete(self) -> None:
        covered: dict[int, int] = {}
        for part in (p for parts in self.parts.values() for p in parts):
            size = part.view[part.inside].numel()
            covered[id(part.view)] = covered.get(id(part.view), 0) + size
        holes = sorted(
            {
                piece.key
                for pieces in self.slices.values()
                for piece in pieces
                if covered.get(id(piece.view), 0) != piece.view.numel()
            }
        )
        if holes:
            raise WeightsError(f"the checkpoint holds only parts of: {', '.join(holes)}")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the reader puts a chunk before it is handed out."""
        return torch.empty(read_item.lengths, dtype=self.dtypes[read_item.dest_index.fqn])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Hand a chunk out to the slices, cast to their dtype."""
        for part in self.parts[read_item.dest_index]:
            part.view[part.inside].copy_(tensor[part.stored])

    def load_bytes(self, read_item: ReadItem, value: Any) -> NoReturn:
        """Never asked for: objects of a checkpoint are not read."""
        raise WeightsError(f"refused to read the pickled object {read_item.dest_index.fqn}")

    def set_up_planner(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to do: the slices are known."""

    def create_local_plan(self) -> NoReturn:
        """Not used: plans are made by ``plan``."""
        raise AssertionError("plans are made by plan()")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Each rank reads for itself."""
        return central_plan


def _read_item(place: MetadataIndex, chunk: ChunkStorageMetadata) -> ReadItem:
    start = torch.Size([0] * len(chunk.sizes))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=place,
        dest_offsets=start,
        storage_index=place,
        storage_offsets=start,
        lengths=chunk.sizes,
    )


def _overlap(piece: Slice, chunk: ChunkStorageMetadata) -> _Part | None:
    inside: list[slice] = []
    stored: list[slice] = []
    for mine, size, theirs, length in zip(
        piece.offset, piece.view.shape, chunk.offsets, chunk.sizes, strict=True
    ):
        first, last = max(mine, theirs), min(mine + size, theirs + length)
        if last <= first:
            return None
        inside.append(slice(first - mine, last - mine))
        stored.append(slice(first - theirs, last - theirs))
    return _Part(piece.view, tuple(inside), tuple(stored))
