"""Record the step of a snapshot anew on a parallel layout: read, run, write as the trainer does.

Every rank of the job calls :func:`record`; rank 0 writes what is not the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica

from replay_lib.engine.fitting import refuse_what_cannot_be_split
from replay_lib.engine.layout import Layout
from replay_lib.engine.model_config import ModelConfig, model_config
from replay_lib.engine.weights import load_weights, vocab_rows
from replay_lib.errors import UnsupportedModelError
from replay_lib.microbatch import split_ranks
from replay_lib.snapshot import (
    Content,
    SafeReader,
    Snapshot,
    load_batch,
    load_model_fields,
    load_settings,
    open_snapshot,
    write_snapshot,
)
from replay_lib.snapshot.model import Parallel
from replay_lib.snapshot.write import read_worker_config
from replay_lib.zoo.native.divide import divide
from replay_lib.zoo.native.model import build_chunks, new_optimizer
from replay_lib.zoo.native.parallel import model_sizes, shown, worker_sizes
from replay_lib.zoo.native.step import Step, run_step

#: What a bridge saves beside the tensors; the optimizer's state is left out. Always copied: the
#: dictionary that Megatron is given gets its process groups added.
CONTENT = {
    "distrib_optim_sharding_type": "dp_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True)
class Recorded:
    """The norm before clipping and that of each checkpoint tensor, layers apart."""

    norm: float
    parameters: dict[str, float]


def record(source: Path, target: Path, parallel: Parallel, device: torch.device) -> Recorded:
    """Run the step of the snapshot ``source`` on ``parallel`` and write it as ``target``.

    Same weights, rows, routes, old log-probabilities and settings; rows are divided over the
    data-parallel ranks as the trainer does it. All ranks of the default group call this, after
    :func:`replay_lib.zoo.native.model.join_groups`.
    """
    snapshot = open_snapshot(source)
    config = model_config(load_model_fields(snapshot))
    vocab = vocab_rows(SafeReader(source).read_metadata(), source)
    _refuse(snapshot, parallel, config, vocab)
    seed = int(read_worker_config(snapshot).get("seed") or 0)
    batches = divide(
        [load_batch(snapshot, d) for d in range(snapshot.parallel.dp)],
        parallel.dp,
        seed=seed,
        padding_length=snapshot.worker.padding_sample_length,
    )
    mine = parallel_state.get_data_parallel_rank()
    worker = snapshot.worker
    splits = split_ranks(
        [b.lengths() for b in batches],
        [b.width for b in batches],
        dynamic=worker.use_dynamic_batch_size,
        micro_batch_size=worker.train_micro_batch_size,
        seq_length=worker.seq_length,
        vpp=parallel.vpp,
        group=parallel.pp if parallel.vpp else None,
    )
    replay = worker.enable_routing_replay and any(config.moe_layers)
    chunks = build_chunks(config, parallel, vocab=vocab, replay=replay, device=device)
    _fill(chunks, source)
    bf16 = config.dtype == "bfloat16"
    optimizer = new_optimizer(chunks, bf16=bf16, clip_grad=worker.clip_grad)
    step = Step(
        batch=batches[mine],
        split=splits[mine],
        settings=load_settings(snapshot),
        moe_layers=config.moe_layers,
        routes=replay,
        device=device,
    )
    norm = run_step(chunks, optimizer, step)
    figures = _gathered(_grad_info(chunks[0]))
    content = Content(
        step=snapshot.step,
        grad_norm_preclip=norm,
        grad_norm_median=snapshot.grad_norm_median,
        worker_config=read_worker_config(snapshot) | worker_sizes(parallel),
        run_config=_run_config(snapshot, parallel),
        batches=tuple(batches),
        settings=step.settings,
        tensors={},
        grad_info=dict(enumerate(figures)),
    )
    _write(target, content, chunks)
    return Recorded(norm, _parameter_norms(chunks, min(1.0, worker.clip_grad / (norm + 1e-6))))


def _refuse(snapshot: Snapshot, parallel: Parallel, config: ModelConfig, vocab: int) -> None:
    """What cannot be recorded here, by name."""
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep", "dp")}
    refuse_what_cannot_be_split(Layout(**sizes), config, vocab)
    stages = parallel.pp * (parallel.vpp or 1)
    refused = []
    if len(config.moe_layers) % stages:
        refused.append(f"{len(config.moe_layers)} layers, which pp * vpp={stages} does not divide")
    if snapshot.worker.replay_routing_for_loss_tokens_only:
        refused.append("replay_routing_for_loss_tokens_only")
    if refused:
        raise UnsupportedModelError(
            f"{snapshot.path}: a step on {shown(parallel)} cannot be recorded with "
            f"{' and '.join(refused)}. Choose another layout or snapshot."
        )


def _fill(chunks: Iterable[Any], source: Path) -> None:
    """Load weights: names are compared over all chunks of all ranks, so as one module."""
    whole = _Chunks(chunks)
    load_weights(whole, source, _gathered)  # type: ignore[arg-type]


class _Chunks:
    """Several chunks with the one method that the loader asks for."""

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.chunks = list(chunks)

    def sharded_state_dict(self, **options: Any) -> dict[str, Any]:
        return {
            f"{number}.{key}": value
            for number, chunk in enumerate(self.chunks)
            for key, value in chunk.module.sharded_state_dict(**options).items()
        }


def _gathered(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _grad_info(chunk: Any) -> dict[str, dict[str, float]]:
    """Figures of the first chunk's parameters, after clipping, under the names that AXRL prints."""
    return {
        name: {
            "grad_norm": float(parameter.main_grad.norm()),
            "grad_max": float(parameter.main_grad.abs().max()),
            "param_norm": float(parameter.data.norm()),
        }
        for name, parameter in chunk.named_parameters()
    }


def _run_config(snapshot: Snapshot, parallel: Parallel) -> str:
    document = yaml.safe_load(snapshot.run_config_file.read_text(encoding="utf-8"))
    document["model"] |= model_sizes(parallel)
    return str(yaml.safe_dump(document, sort_keys=True))


def _write(target: Path, content: Content, chunks: list[Any]) -> None:
    """Rank 0 writes the snapshot; all ranks write the checkpoint into its temporary directory."""
    box: list[Any] = [None]

    def checkpoint(part: Path) -> None:
        box[0] = str(part)
        dist.broadcast_object_list(box, src=0)
        _save(Path(box[0]), content.step, chunks)

    if dist.get_rank() == 0:
        write_snapshot(target, content, checkpoint=checkpoint)
    else:
        dist.broadcast_object_list(box, src=0)
        _save(Path(box[0]), content.step, chunks)
    dist.barrier()


def _save(part: Path, step: int, chunks: list[Any]) -> None:
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": step}
    for number, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        state[key] = chunk.module.sharded_state_dict(metadata=dict(CONTENT))
    dist_checkpointing.save(state, str(part), content_metadata=dict(CONTENT))


def _parameter_norms(chunks: list[Any], clipped: float) -> dict[str, float]:
    """L2 norm of each parameter's whole gradient before clipping, by checkpoint key and layer.

    Gradients take the place of the parameters, and each rank tells the squares of those shards of
    which Megatron's checkpointing calls it the main owner: so each element counts once, found
    without what the gradient norm goes by.
    """
    squares: dict[str, float] = {}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad
        for shard in _shards(chunk.module.sharded_state_dict(metadata=dict(CONTENT)).values()):
            if is_main_replica(shard.replica_id):
                name = shard.key
                if name.startswith("decoder.layers."):
                    name = f"{name}[{shard.global_offset[0]}]"
                value = float(shard.data.double().square().sum())
                squares[name] = squares.get(name, 0.0) + value
    total: dict[str, float] = {}
    for part in _gathered(squares):
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return {name: total[name] ** 0.5 / clipped for name in sorted(total)}


def _shards(entries: Iterable[Any]) -> Iterator[ShardedTensor]:
    for entry in entries:
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build()
            yield from _shards(built.values() if isinstance(built, dict) else built)
        elif isinstance(entry, ShardedTensor):
            yield entry
