"""Inert classes that take the place of the trainer's own while a file is read.

A stand-in keeps what the pickle says and does nothing else, so neither AXRL, ray, tensordict,
pydantic nor numpy's pickle support is needed, and no code of theirs runs. The lists below are
the whole of what a file may name besides plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class StandIn:
    """Keeps the arguments and the state that a pickle gives an object."""

    pickled_as = ""

    def __new__(cls, *args: Any) -> StandIn:
        self = super().__new__(cls)
        self.args = args
        self.state = None
        return self

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *_args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


Table = dict[str, Callable[..., Any]]


def _empty_bytes(*args: Any) -> bytes:
    """Protocol 2 spells ``b""`` as a call of ``bytes``."""
    if args:
        raise ValueError("bytes(...) with arguments is never written by pickle")
    return b""


def stand_ins(names: Iterable[str]) -> Table:
    """One fresh stand-in class for each full name."""
    return {name: type(name.rpartition(".")[2], (StandIn,), {"pickled_as": name}) for name in names}


_NUMPY = (
    "numpy._core.multiarray._reconstruct",  # numpy >= 2
    "numpy.core.multiarray._reconstruct",  # numpy 1
    "numpy.ndarray",
    "numpy.dtype",
)
_TENSORDICT = (
    "axrl.data.sample.SampleTensorDict",
    "tensordict._td.TensorDict",
    "tensordict.tensordict.TensorDict",
    "tensordict._reductions._make_td",
    "tensordict.tensorclass.NonTensorData",
    "tensordict.tensorclass.NonTensorStack",
)
_HANDLES = (
    "axrl.utils.tensor_store.TensorHandle",
    "ray.ObjectRef",
    "ray._raylet.ObjectRef",
)
_MERGE = (
    "axrl.utils.megatron.prefix_tree.PrefixMergeInfo",
    "axrl.utils.megatron.prefix_tree.PrefixTreeNode",
)
GRPO_TRAINER = "axrl.trainer.grpo_trainer.GrpoTrainer"
_OTHER_TRAINERS = (
    "axrl.trainer.value_trainer.ValueTrainer",
    "axrl.trainer.sft_trainer.SftTrainer",
    "axrl.trainer.base_trainer.BaseTrainer",
)
_CONFIGS = tuple(
    f"axrl.configs.{name}"
    for name in [
        "GrpoTrainerConfig",
        "GrpoConfig",
        "SftTrainerConfig",
        "EntropyControlConfig",
        "OPDConfig",
        "PPOValueConfig",
        "RolloutWorkerConfig",
        "ModelConfig",
        "SamplingConfig",
    ]
)


def batch_table() -> Table:
    """What a batch file may name."""
    return _with_bytes(stand_ins(_TENSORDICT + _HANDLES + _MERGE + _NUMPY))


def routing_table() -> Table:
    """What a routing payload may name."""
    return _with_bytes(stand_ins(_NUMPY))


def trainer_table() -> Table:
    """What a trainer file may name; trainers that are not GrpoTrainer are refused later."""
    return stand_ins((GRPO_TRAINER, *_OTHER_TRAINERS, *_CONFIGS))


def _with_bytes(table: Table) -> Table:
    return {**table, "builtins.bytes": _empty_bytes}


def is_a(value: Any, *names: str) -> bool:
    """Whether ``value`` stands for an object of one of the classes ``names`` (last part)."""
    return isinstance(value, StandIn) and value.pickled_as.rpartition(".")[2] in names
