"""Write an experiment's whole gradient to a file, for comparisons outside the worker."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from replay_lib.engine.gradients import GradientBuffers
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.replayer import Replayer, patched_for
from replay_lib.engine.step import Loaded, new_variant, run_variants
from replay_lib.engine.weights import Slice, is_stacked

Place = tuple[tuple[int, ...], tuple[int, ...]]  # (shape of a whole parameter, offset in it)


def save_gradients(replayer: Replayer, experiment: Experiment, path: str) -> None:
    """Replay ``experiment`` and write its gradient (float32, by reported parameter name).

    A dict of tensors that ``torch.load(weights_only=True)`` reads, whole whatever the layout;
    rank 0 writes, through a temporary name in the same directory.
    """
    loaded = replayer.loaded
    variant = new_variant(loaded, patched_for(replayer, experiment))
    run_variants(loaded, [variant])
    tensors = _whole(loaded, variant.buffers)
    if loaded.comm.rank != 0:
        return
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    torch.save(tensors, part)
    part.replace(target)


def _whole(loaded: Loaded, buffers: GradientBuffers) -> dict[str, Tensor]:
    """Whole gradients on rank 0; the other ranks' pieces arrive one parameter at a time."""
    if loaded.comm.world == 1:
        return {loaded.names.get(k, k): v.cpu().clone() for k, v in buffers.views.items()}
    pieces: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in loaded.pieces:
        if loaded.counted is None or piece.owner in loaded.counted:
            name = loaded.names[piece.owner]
            shapes[name], offset = _place(piece)
            pieces.setdefault(name, []).append((offset, _gradient_of(piece, loaded, buffers)))
    everybody = {n: s for told in loaded.comm.gather(shapes) for n, s in told.items()}
    whole: dict[str, Tensor] = {}
    for name, shape in everybody.items():
        tensor = torch.zeros(shape, device=buffers.flat.device)
        for offset, part in pieces.get(name, []):
            inside = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            tensor[inside] = part
        dist.reduce(tensor, dst=0)  # each element comes from one rank, the others add zeros
        if loaded.comm.rank == 0:
            whole[name] = tensor.cpu()
    return whole


def _place(piece: Slice) -> Place:
    if is_stacked(piece.key):
        return piece.whole[1:], piece.offset[1:]
    return piece.whole, piece.offset


def _gradient_of(piece: Slice, loaded: Loaded, buffers: GradientBuffers) -> Tensor:
    """The part of the owner's gradient that lies where ``piece`` lies in the owner."""
    owner = loaded.collector.parameters[piece.owner]
    start = piece.view.storage_offset() - owner.storage_offset()
    flat = buffers.views[piece.owner].reshape(-1)
    shape = piece.view.shape[1:] if is_stacked(piece.key) else piece.view.shape
    return flat[start : start + piece.view.numel()].view(shape)
