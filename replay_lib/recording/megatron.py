"""A Megatron-Core job: layout, configuration, weights and gradients, read off the live model."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from replay_lib.errors import UsageError, fault
from replay_lib.recording.documents import StepSettings, run_config, worker_config
from replay_lib.recording.figures import Figures, measure
from replay_lib.recording.job import Job
from replay_lib.snapshot.model import Parallel

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.loss.settings import GrpoSettings
    from replay_lib.recording.checkpoint import Blob, Piece

#: Arguments of GPTModel that shape the network, with its attribute for each.
_OF_MODEL = {
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "rope_scaling": "rotary_scaling",
    "share_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "vocab_size": "vocab_size",
}
#: As a bridge asks for the state: shards that the writer and Megatron's loader know.
_METADATA = {"singleton_local_shards": False}


def megatron_job(model: Any, *, settings: GrpoSettings, step: StepSettings, **fields: Any) -> Job:
    """The job of ``model``: a GPTModel or its chunks, wrapped in DDP or Float16Module or not.

    Megatron's parallel state must be initialised, in its default rank order. ``fields`` are added
    to the model's configuration where it leaves something out. Every rank calls this.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    parallel = live_parallel()
    told = _fields(_core(chunks[0]), parallel) | {"seq_length": step.seq_length} | fields
    return Job(
        parallel=parallel,
        worker_config=worker_config(step, parallel, told, None),
        run_config=run_config(told),
        stated=bool(fields),
        settings=settings,
        pieces=lambda: _pieces(chunks),
        figures=lambda: _figures(chunks),
    )


def live_parallel() -> Parallel:
    """The layout of Megatron's parallel state; a UsageError where ranks are ordered otherwise."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    vpp = state.get_virtual_pipeline_model_parallel_world_size()
    parallel = Parallel(
        tp=state.get_tensor_model_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        vpp=vpp if vpp and vpp > 1 else None,
        cp=state.get_context_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_world_size() or 1,
        dp=state.get_data_parallel_world_size(),
    )
    mine, expected = state.get_data_parallel_rank(), parallel.dp_rank(dist.get_rank())
    if mine != expected:
        found = f"data-parallel rank {mine} on rank {dist.get_rank()}"
        then = "Initialise the model parallel groups in Megatron's default order, tp-cp-ep-dp-pp."
        raise UsageError(fault("recorder", "rank order", found, str(expected), then))
    return parallel


def _core(chunk: Any) -> Any:
    """The GPTModel inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _fields(core: Any, parallel: Parallel) -> dict[str, Any]:
    config = core.config
    told = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, attribute in _OF_MODEL.items():
        if hasattr(core, attribute):
            told[name] = getattr(core, attribute)
    return told | {"virtual_pipeline_model_parallel_size": parallel.vpp}


def _pieces(chunks: Sequence[Any]) -> Iterator[Piece | Blob]:
    for chunk in chunks:
        state = _core(chunk).sharded_state_dict(metadata=dict(_METADATA))
        for entry in state.values():
            yield from _of_entry(entry)


def _of_entry(entry: Any) -> Iterator[Piece | Blob]:
    """Tensors of a sharded state, and the extra state that Megatron's loader asks for."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    from replay_lib.recording.checkpoint import Blob, Piece

    if isinstance(entry, ShardedTensorFactory):
        built = entry.build()
        for part in built.values() if isinstance(built, dict) else built:
            yield from _of_entry(part)
    elif isinstance(entry, ShardedTensor):
        data = entry.data.detach()
        lead = (1,) * (len(entry.global_shape) - data.dim())
        yield Piece(
            entry.key,
            tuple(entry.global_shape),
            tuple(entry.global_offset),
            data.view(lead + tuple(data.shape)),
        )
    elif isinstance(entry, ShardedObject):
        yield Blob(entry.unique_key, _saved([entry.data]))


def _saved(value: Any) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _figures(chunks: Sequence[Any]) -> Figures:
    """Of all chunks of this rank, under the names that the wrapped modules give (AXRL's, too)."""

    def entries() -> Iterator[tuple[str, Tensor, Tensor | None, bool]]:
        for number, chunk in enumerate(chunks):
            prefix = f"chunk{number}." if number else ""
            for name, parameter in chunk.named_parameters():
                gradient = getattr(parameter, "main_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                yield f"{prefix}{name}", parameter, gradient, _counted(parameter)

    return measure(entries())


def _counted(parameter: Any) -> bool:
    """Whether this rank counts the parameter: as Megatron's gradient norm, and once a replica."""
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    if not param_is_not_shared(parameter):
        return False
    if not getattr(parameter, "allreduce", True):  # an expert's: its own groups
        return bool(state.get_expert_data_parallel_rank() == 0)
    first = state.get_data_parallel_rank(with_context_parallel=True) == 0
    return bool(first and param_is_not_tensor_parallel_duplicate(parameter))
