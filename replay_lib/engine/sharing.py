"""Which ranks hold the same parameters: whose gradients are summed, and who counts each once.

Four kinds of parameters. ``marked`` ones (norms, routers) are the same on all tensor-parallel
ranks, but each rank saw only its own tokens or heads: gradients are summed over these ranks first.
``whole`` ones (shards of matrices among them) and ``marked`` ones are then summed over data and
context parallel ranks. ``experts`` are summed over the ranks that have the same experts. A tied
embedding lives on the first and the last pipeline stage, and is summed over the two.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from replay_lib.engine.groups import Axis, Groups
from replay_lib.engine.model import LiveModel


class Kind(enum.IntEnum):
    """How a parameter's gradient is summed; buffers hold the kinds in this order."""

    MARKED = 0
    WHOLE = 1
    EXPERT = 2


def kind_of(parameter: Tensor) -> Kind:
    """Read from the marks that Megatron's modules and ours put on their parameters."""
    if getattr(parameter, "expert", False):
        return Kind.EXPERT
    return Kind.MARKED if getattr(parameter, "sequence_parallel", False) else Kind.WHOLE


def ordered_parameters(module: nn.Module, groups: Groups) -> dict[str, nn.Parameter]:
    """Parameters by module name; with several ranks those of one kind follow each other."""
    named = list(module.named_parameters())
    if groups.layout.ranks > 1:
        named.sort(key=lambda pair: kind_of(pair[1]))  # stable
    return dict(named)


def sum_over_ranks(
    flat: Tensor, views: Mapping[str, Tensor], parameters: Mapping[str, Tensor], groups: Groups
) -> None:
    """Sum a finished gradient over the ranks that share its parameters, in place.

    ``flat`` holds all gradients in the order of ``views``, which is that of
    :func:`ordered_parameters`.
    """
    if groups.layout.ranks == 1:
        return
    kinds = {name: kind_of(p) for name, p in parameters.items()}
    sizes = [sum(v.numel() for n, v in views.items() if kinds[n] is kind) for kind in Kind]
    marked, dense = sizes[Kind.MARKED], sizes[Kind.MARKED] + sizes[Kind.WHOLE]
    _sum(flat[:marked], groups.tp)
    _sum(flat[:dense], groups.dense)
    _sum(flat[dense : dense + sizes[Kind.EXPERT]], groups.experts)
    for name, parameter in parameters.items():
        if getattr(parameter, "shared_embedding", False):
            _sum(views[name], groups.embedding)


def _sum(tensor: Tensor, axis: Axis) -> None:
    if axis.size > 1 and tensor.numel():
        dist.all_reduce(tensor, group=axis.group)


def counted_here(model: LiveModel) -> frozenset[str]:
    """Module names of the parameters that this rank counts, so that each counts once in the job."""
    groups = model.groups
    return frozenset(name for name, p in model.module.named_parameters() if _counted(p, groups))


def _counted(parameter: Any, groups: Groups) -> bool:
    if is_tied_copy(parameter):
        return False
    if kind_of(parameter) is Kind.EXPERT:
        return groups.experts.rank == 0
    shard = getattr(parameter, "tensor_model_parallel", False)
    return groups.dense.rank == 0 and (shard or groups.tp.rank == 0)


def is_tied_copy(parameter: Any) -> bool:
    """Whether this is the last stage's copy of the embedding."""
    return bool(getattr(parameter, "shared", False))
