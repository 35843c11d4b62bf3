"""The replay directory of one experiment: what AXRL's worker is pointed at.

Batch, routes, settings, figures and metadata are written anew by this library's writers, out of
what was read without trusting it. The checkpoint is linked: Megatron reads that part itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.backend.seams import Routes
from replay_lib.batch import RankBatch
from replay_lib.loss import GrpoSettings
from replay_lib.snapshot.batches import load_batch, load_handles
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.naming import save_named
from replay_lib.snapshot.trainer import load_grad_info, load_settings, read_trainer_config
from replay_lib.snapshot.write import read_worker_config, whole_directory
from replay_lib.snapshot.write_checkpoint import BACKEND
from replay_lib.snapshot.write_rank import (
    RowHandles,
    saved_rows,
    write_batch,
    write_routing,
    write_trainer,
)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a snapshot holds beside its checkpoint, read once. ``handles[d]`` is by row."""

    snapshot: Snapshot
    batches: tuple[RankBatch, ...]
    handles: tuple[tuple[RowHandles | None, ...], ...]
    settings: GrpoSettings
    saved_settings: dict[str, Any]
    worker_config: dict[str, Any]


def read_recorded(snapshot: Snapshot) -> Recorded:
    """Read all ranks' batches and handles, the settings and the worker's configuration."""
    ranks = range(snapshot.parallel.dp)
    return Recorded(
        snapshot=snapshot,
        batches=tuple(load_batch(snapshot, d) for d in ranks),
        handles=tuple(saved_rows(*load_handles(snapshot, d)) for d in ranks),
        settings=load_settings(snapshot),
        saved_settings=read_trainer_config(snapshot),
        worker_config=read_worker_config(snapshot),
    )


def write_replay_directory(
    target: Path,
    recorded: Recorded,
    *,
    batches: Sequence[RankBatch],
    settings: GrpoSettings,
    routes: Routes,
) -> Path:
    """Write the directory ``target`` (it must not exist): all of it or none of it.

    ``batches`` are those of each data-parallel rank after the patches; their routes are the
    recorded ones, or none where ``routes`` says so. Returns ``target``.
    """
    snapshot = recorded.snapshot
    with whole_directory(target) as directory:
        _link_checkpoint(snapshot.path, directory)
        counts = []
        for rank in range(snapshot.parallel.world_size):
            dp_rank = snapshot.parallel.dp_rank(rank)
            rows = recorded.handles[dp_rank]
            handles = rows if routes != "none" else (None,) * len(rows)
            write_batch(directory / layout.batch_file(rank), batches[dp_rank], handles)
            counts.append(write_routing(directory / layout.routing_file(rank), handles))
            _copy_figures(snapshot, rank, directory)
        write_trainer(directory / layout.TRAINER, settings, recorded.saved_settings)
        _write_documents(directory, recorded, routes, counts[0])
    return target


#: Written anew, or read by nobody; everything else in a snapshot is Megatron's.
_NOT_LINKED = (
    layout.AXRL_METADATA,
    layout.MEGATRON_METADATA,
    layout.WORKER_CONFIG,
    layout.TRAINER,
    layout.PRESERVED_MANIFEST,  # speaks of the directory that it lies in
)


def _link_checkpoint(source: Path, directory: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.name not in _NOT_LINKED and layout.rank_file(file) is None:
            (directory / file.name).symlink_to(file.resolve())


def _copy_figures(snapshot: Snapshot, rank: int, directory: Path) -> None:
    if (snapshot.path / layout.grad_info_file(rank)).exists():
        save_named(load_grad_info(snapshot, rank), directory / layout.grad_info_file(rank))


def _write_documents(directory: Path, recorded: Recorded, routes: Routes, count: int) -> None:
    """Both metadata files and the worker's configuration.

    A legacy snapshot has AXRL's metadata in Megatron's file; here each gets its own.
    """
    snapshot = recorded.snapshot
    config = {**recorded.worker_config, **routing_fields(routes, snapshot)}
    norm, median = snapshot.grad_norm_preclip, snapshot.grad_norm_median
    metadata = {
        "metadata_version": 2,
        "global_step": snapshot.step,
        "grad_norm": norm,
        "grad_norm_median": median,
        "spike_ratio_actual": snapshot.spike_ratio_recorded,
        "config": config,
        "megatron_worker_config_file": layout.WORKER_CONFIG,
        "trainer_file": layout.TRAINER,
        "routing_payload_count_rank0": count,
    }
    documents = {
        layout.AXRL_METADATA: metadata,
        layout.WORKER_CONFIG: config,
        layout.MEGATRON_METADATA: BACKEND,
    }
    for name, value in documents.items():
        # bare NaN and Infinity on purpose: that is what the trainer writes and reads
        (directory / name).write_text(json.dumps(value, indent=2), encoding="utf-8")


def routing_fields(routes: Routes, snapshot: Snapshot) -> dict[str, bool]:
    """Fields of the worker's configuration that say where saved routes are forced."""
    return {
        "enable_routing_replay": snapshot.worker.enable_routing_replay,
        "replay_routing_for_loss_tokens_only": routes == "loss tokens",
    }
