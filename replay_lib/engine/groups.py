"""This process's place on each axis of the layout, with Megatron's process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from replay_lib.engine.layout import ONE_RANK, Layout
from replay_lib.errors import UsageError


@dataclass(frozen=True)
class Axis:
    """One axis: the process group of the ranks that differ only on it, and the place in it."""

    group: Any = None  # torch's ProcessGroup; None where there is one rank
    rank: int = 0
    size: int = 1

    def global_rank(self, rank: int) -> int:
        """The job's rank of the group's ``rank``."""
        return dist.get_global_rank(self.group, rank)


#: The axis of a replay that is not split along it.
ALONE = Axis()


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Where this process stands.

    ``dense`` are the ranks among which gradients of ordinary parameters are summed (data and
    context parallel), ``experts`` those for experts (which each expert-parallel rank has its own
    of). ``embedding`` joins the first and the last pipeline stage.
    """

    layout: Layout = ONE_RANK
    tp: Axis = ALONE
    pp: Axis = ALONE
    cp: Axis = ALONE
    dp: Axis = ALONE
    ep: Axis = ALONE
    dense: Axis = ALONE
    experts: Axis = ALONE
    embedding: Axis = ALONE

    @property
    def first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.pp.rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the output layer."""
        return self.pp.rank == self.pp.size - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one of its batches that counts what is counted a batch."""
        return self.tp.rank == 0 and self.cp.rank == 0 and self.pp.rank == 0


def init_groups(layout: Layout = ONE_RANK) -> Groups:
    """Megatron's process groups for ``layout`` over all ranks of the default group.

    Raises UsageError where the job has another number of ranks. Megatron keeps its groups in
    module globals, so a process has one layout for its life.
    """
    from megatron.core import parallel_state, tensor_parallel

    world = dist.get_world_size()
    if layout.ranks != world:
        raise UsageError(f"layout {layout}: it has {layout.ranks} ranks, the job has {world}")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    if world == 1:
        return Groups(layout=layout)
    at = parallel_state
    return Groups(
        layout=layout,
        tp=_axis(at.get_tensor_model_parallel_group()),
        pp=_axis(at.get_pipeline_model_parallel_group()),
        cp=_axis(at.get_context_parallel_group()),
        dp=_axis(at.get_data_parallel_group()),
        ep=_axis(at.get_expert_model_parallel_group()),
        dense=_axis(at.get_data_parallel_group(with_context_parallel=True)),
        experts=_axis(at.get_expert_data_parallel_group()),
        embedding=_axis(at.get_embedding_group(check_initialized=False)),
    )


def _axis(group: Any) -> Axis:
    """Megatron gives None, or a group without this rank, where the rank is not on the axis."""
    if group is None or dist.get_rank(group) < 0:
        return ALONE
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))
