"""Write parameters as a ``torch_dist`` checkpoint, in one process and without a process group."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from replay_lib import layout
from replay_lib.snapshot.naming import save_named

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class CheckpointWriter(FileSystemWriter):
    """Names the checkpoint after its final directory, not after the temporary one."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=True)
        self._name = name

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._name, save_id=self.save_id)


def write_checkpoint(directory: Path, name: str, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Parameters by Megatron's checkpoint keys, whole, into the existing ``directory``.

    ``name`` is what the checkpoint calls itself. Also writes Megatron's ``common.pt``, and last its
    ``metadata.json``, which marks a complete checkpoint.
    """
    state = {key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}
    with warnings.catch_warnings():
        # torch says that no process group is there; that is what is asked for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(dict(state), storage_writer=CheckpointWriter(directory, name), no_dist=True)
    save_named({"checkpoint_version": 3.0, "iteration": step}, directory / layout.COMMON)
    text = json.dumps(BACKEND)
    (directory / layout.MEGATRON_METADATA).write_text(text, encoding="utf-8")


def write_train_state(directory: Path, step: int) -> None:
    """Megatron-Bridge's counters, ``train_state.pt``; only the step is known here."""
    counters = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    flags = ("do_train", "do_valid", "do_test")
    state = {
        "step": torch.tensor(step),
        **{name: torch.tensor(0) for name in counters},
        "floating_point_operations_so_far": torch.tensor(0.0),
        **{name: torch.tensor(False) for name in flags},
    }
    save_named(state, directory / layout.TRAIN_STATE)
