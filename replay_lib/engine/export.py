"""Write an experiment's whole gradient to a file, for comparisons outside the worker."""

from __future__ import annotations

from pathlib import Path

import torch

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.replayer import Replayer, patched_for
from replay_lib.engine.step import new_variant, run_variants


def save_gradients(replayer: Replayer, experiment: Experiment, path: str) -> None:
    """Replay ``experiment`` and write its gradient (float32, by reported parameter name).

    A dict of tensors that ``torch.load(weights_only=True)`` reads; rank 0 writes, through a
    temporary name in the same directory.
    """
    loaded = replayer.loaded
    variant = new_variant(loaded, patched_for(replayer, experiment))
    run_variants(loaded, [variant])
    if loaded.comm.rank != 0:
        return
    tensors = {loaded.names.get(k, k): v.cpu().clone() for k, v in variant.buffers.views.items()}
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    torch.save(tensors, part)
    part.replace(target)
