"""Write a snapshot's checkpoint anew with the installed Megatron-Core's own writer.

``python megatron_writer.py SNAPSHOT``: in Megatron-Core 0.16 that leaves a ``common.pt``, in 0.19
the common state lies inside the checkpoint. As a trainer's, it holds optimizer, RNG and extra
state beside the parameters, and every layer is a shard of its own. Run as a program: it needs a
process group.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def main(snapshot: Path) -> None:
    """Replace the checkpoint in the snapshot directory."""
    from megatron.core import dist_checkpointing

    from replay_lib.snapshot import read_tensors

    tensors = read_tensors(snapshot)
    for path in (*snapshot.glob("*.distcp"), snapshot / ".metadata", snapshot / "metadata.json"):
        path.unlink()
    (snapshot / "common.pt").unlink(missing_ok=True)
    state = {"model": dict(_shards(tensors)), "optimizer": dict(_others(tensors))}
    common = {"checkpoint_version": 3.0, "iteration": 85, "content_metadata": {"x": 1}}
    made = snapshot.with_name("made")
    made.mkdir()
    dist_checkpointing.save(state | common, str(made))
    for path in made.iterdir():
        shutil.move(path, snapshot / path.name)
    made.rmdir()


def _shards(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Whole tensors; a stack of layers as one shard a layer, as Megatron's layers have it."""
    from megatron.core.dist_checkpointing import ShardedTensor

    for key, tensor in tensors.items():
        if not key.startswith("decoder.layers.") or key.split(".")[2].isdigit():
            yield key, ShardedTensor.from_rank_offsets(key, tensor)
            continue
        for layer, part in enumerate(tensor):
            place = (0, layer, len(tensor))
            shard = ShardedTensor.from_rank_offsets(key, part, place, prepend_axis_num=1)
            yield f"{layer}.{key}", shard


def _others(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """State that no reader of parameters may open."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    flat = torch.cat([tensor.float().flatten() for tensor in tensors.values()])
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32)"
    for name in ("param", "exp_avg", "exp_avg_sq"):
        full = f"{key}.bucket_idx_0.{name}"
        yield full, ShardedTensor.from_rank_offsets(full, flat)
    for name in ("decoder.layers.self_attention.core_attention._extra_state", "rng_state"):
        yield name, ShardedObject(name, [None], (1,), (0,))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from replay_lib.engine import shims

    shims.install()
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
