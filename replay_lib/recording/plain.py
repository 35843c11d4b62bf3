"""A plain torch job: replicated weights, one process or one a data-parallel rank.

The user says which checkpoint tensor each parameter is, by Megatron's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from replay_lib.errors import WeightsError, fault
from replay_lib.recording.documents import StepSettings, run_config, worker_config
from replay_lib.recording.job import Job
from replay_lib.snapshot.model import Parallel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from replay_lib.loss.settings import GrpoSettings
    from replay_lib.recording.checkpoint import Piece
    from replay_lib.recording.figures import Figures

#: A place ("key", "key[3]", "key[3, 0:64]") or a function that splits a parameter into places.
Place = str | Callable[["Tensor"], Mapping[str, "Tensor"]]

_PLACE = re.compile(r"^([\w.]+)(?:\[([\d:, ]+)\])?$")


def torch_job(
    model: torch.nn.Module,
    *,
    names: Mapping[str, Place],
    fields: Mapping[str, Any],
    settings: GrpoSettings,
    step: StepSettings,
) -> Job:
    """The job of ``model``, whole on every rank (alone, or in DistributedDataParallel).

    ``names`` gives every parameter's place in the checkpoint by Megatron's names, with the layer
    (and the expert) in front: ``decoder.layers.mlp.router.weight[3]``; rows of a fused matrix as a
    slice, ``...linear_qkv.weight[3, 0:64]``; or a function that splits a parameter into such
    places. ``fields`` are Megatron's fields of the same network. Every rank calls this.
    """
    import torch.distributed as dist

    many = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if many else 1
    rank = dist.get_rank() if many else 0
    parallel = Parallel(tp=1, pp=1, vpp=None, cp=1, ep=1, etp=1, dp=size)
    told = {"seq_length": step.seq_length, **fields}
    core = _unwrapped(model)
    _compare_names(core, names)
    return Job(
        parallel=parallel,
        worker_config=worker_config(step, parallel, told, None),
        run_config=run_config(told),
        stated=True,
        settings=settings,
        pieces=lambda: live_pieces(core, names),
        figures=lambda: _figures(core, rank),
    )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, _module_type())
    return inner


def _module_type() -> type[torch.nn.Module]:
    import torch

    return torch.nn.Module


def _compare_names(model: torch.nn.Module, names: Mapping[str, Place]) -> None:
    """Both ways: a parameter without a place would be lost, a place without one is a typo."""
    from torch.distributed.tensor import DTensor

    own = dict(model.named_parameters())
    lost, strange = sorted(set(own) - set(names)), sorted(set(names) - set(own))
    if lost or strange:
        found = "; ".join(
            f"{what} {', '.join(some)}"
            for what, some in (("no place for", lost), ("no parameter", strange))
            if some
        )
        raise WeightsError(fault("recorder", "names", found, "one place for every parameter"))
    sharded = [name for name, parameter in own.items() if isinstance(parameter, DTensor)]
    if sharded:
        then = "Shard the model with Megatron-Core, or replicate it."
        raise WeightsError(fault("recorder", sharded[0], "a DTensor", "a whole tensor", then))


def live_pieces(model: torch.nn.Module, names: Mapping[str, Place]) -> Iterator[Piece]:
    """Views of the live parameters with their places; WeightsError where a place does not fit."""
    from replay_lib.recording.checkpoint import Piece

    found: list[tuple[str, tuple[slice, ...], int, Tensor]] = []
    for name, parameter in model.named_parameters():
        place, own = names[name], parameter.detach()
        parts = {place: own} if isinstance(place, str) else place(own)
        found += [(*_parsed(name, text), part) for text, part in parts.items()]
    placed = [(key, _box(spot, lead, part), part) for key, spot, lead, part in found]
    wholes: dict[str, tuple[int, ...]] = {}
    for key, (offset, shape), _ in placed:
        ends = tuple(o + n for o, n in zip(offset, shape, strict=True))
        before = wholes.get(key, ends)
        if len(before) != len(ends):
            raise WeightsError(fault("recorder", key, f"{len(ends)} axes", f"{len(before)}"))
        wholes[key] = tuple(map(max, before, ends))
    for key, (offset, shape), part in placed:
        yield Piece(key, wholes[key], offset, part.view(shape))


def _parsed(name: str, text: str) -> tuple[str, tuple[slice, ...], int]:
    """Key, slices, and how many of them are single numbers in front."""
    match = _PLACE.match(text)
    if match is None:
        found = repr(text)
        raise WeightsError(fault("recorder", name, found, "key, key[3] or key[3, 0:64]"))
    inside = [part.strip() for part in (match[2] or "").split(",") if part.strip()]
    spots = []
    for part in inside:
        start, colon, stop = part.partition(":")
        spots.append(slice(int(start), int(stop) if colon else int(start) + 1))
    return match[1], tuple(spots), sum(":" not in part for part in inside)


def _box(
    spots: tuple[slice, ...], lead: int, part: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (1,) * lead + tuple(part.shape)
    starts = tuple(spot.start for spot in spots)
    stated = tuple(spot.stop - spot.start for spot in spots)
    if shape[: len(stated)] != stated:
        found, expected = f"shape {list(part.shape)}", f"{list(stated[lead:])} in front"
        raise WeightsError(fault("recorder", "place", found, expected))
    return starts + (0,) * (len(shape) - len(starts)), shape


def _figures(model: torch.nn.Module, rank: int) -> Figures:
    """Rank 0 counts them: after DistributedDataParallel every rank has the same gradients."""
    from replay_lib.recording.figures import measure

    own = model.named_parameters()
    return measure((name, value, value.grad, rank == 0) for name, value in own)
