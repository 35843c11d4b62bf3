"""Snapshots on disk: open, read and write them. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_lib.merged import MergedRow
    from replay_lib.snapshot.batches import load_batch, load_handles, payload_counts
    from replay_lib.snapshot.checkpoint import SafeReader, iter_tensors, read_tensors
    from replay_lib.snapshot.model import Parallel, Snapshot, SpikeSettings, WorkerConfig
    from replay_lib.snapshot.opening import open_snapshot
    from replay_lib.snapshot.portable.writing import export_snapshot, import_snapshot
    from replay_lib.snapshot.restoring import temporary_replay_directory
    from replay_lib.snapshot.run_config import load_model_fields
    from replay_lib.snapshot.trainer import (
        SavedSettings,
        load_grad_info,
        load_settings,
        read_settings,
    )
    from replay_lib.snapshot.write import Content, read_content, write_snapshot
    from replay_lib.snapshot.write_rank import SavedHandle, object_ref

_ROOMS = {
    "batches": ("MergedRow", "load_batch", "load_handles", "payload_counts"),
    "checkpoint": ("SafeReader", "iter_tensors", "read_tensors"),
    "model": ("Parallel", "Snapshot", "SpikeSettings", "WorkerConfig"),
    "opening": ("open_snapshot",),
    "portable.writing": ("export_snapshot", "import_snapshot"),
    "restoring": ("temporary_replay_directory",),
    "run_config": ("load_model_fields",),
    "trainer": ("SavedSettings", "load_grad_info", "load_settings", "read_settings"),
    "write": ("Content", "read_content", "write_snapshot"),
    "write_rank": ("SavedHandle", "object_ref"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Content",
    "MergedRow",
    "Parallel",
    "SafeReader",
    "SavedHandle",
    "SavedSettings",
    "Snapshot",
    "SpikeSettings",
    "WorkerConfig",
    "export_snapshot",
    "import_snapshot",
    "iter_tensors",
    "load_batch",
    "load_grad_info",
    "load_handles",
    "load_model_fields",
    "load_settings",
    "object_ref",
    "open_snapshot",
    "payload_counts",
    "read_content",
    "read_settings",
    "read_tensors",
    "temporary_replay_directory",
    "write_snapshot",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
