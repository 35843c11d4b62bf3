"""Open a snapshot: metadata, worker settings, and whether every file is there. No torch.

AXRL writes ``axrl_metadata.json`` on rank 0 with no barrier, so it may exist while other ranks'
files do not: completeness is checked file by file.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.errors import IncompleteSnapshotError, SnapshotError, fault, not_allowed
from replay_lib.snapshot.documents import COPY_AGAIN, file_sizes, missing, read_json
from replay_lib.snapshot.imported import read_imported
from replay_lib.snapshot.model import (
    Parallel,
    RankFiles,
    Snapshot,
    SpikeSettings,
    WorkerConfig,
    worker_from,
)
from replay_lib.snapshot.preserved import check_preserved
from replay_lib.snapshot.stated import (
    integer,
    metadata_version,
    number,
    parallel_from,
    validated,
)

_METADATA_IS = "the metadata that AXRL's rank 0 writes last"


def open_snapshot(path: str | Path) -> Snapshot:
    """Read and check the snapshot in directory ``path``, in either layout; needs no torch.

    Raises IncompleteSnapshotError naming the first file that is missing or cut short, and
    SnapshotError where a file says something it cannot, or where the files of a preserved snapshot
    are no longer those that were preserved.
    """
    try:
        return _opened(_directory(Path(path)))
    except PermissionError as error:
        raise SnapshotError(str(not_allowed(error))) from error


def _opened(directory: Path) -> Snapshot:
    check_preserved(directory)
    if layout.is_portable(directory):
        from replay_lib.snapshot.portable.opening import open_portable

        return open_portable(directory)
    metadata, source, legacy = _read_metadata(directory)
    raw, raw_source = _worker_config(directory, metadata, source)
    worker = validated(WorkerConfig, worker_from, raw, raw_source)
    spike = raw.get("spike_debug") or {}
    parallel = parallel_from(raw, raw_source)
    imported = read_imported(directory)
    if imported is None:
        _check_shared_files(directory, legacy)
    count = integer(metadata, "routing_payload_count_rank0", source)
    return Snapshot(
        path=directory,
        step=_step(directory, metadata, source),
        grad_norm_preclip=number(metadata, "grad_norm", source),
        grad_norm_median=number(metadata, "grad_norm_median", source),
        spike_ratio_recorded=number(metadata, "spike_ratio_actual", source),
        metadata_version=metadata_version(metadata, source),
        legacy=legacy,
        routing_payload_count_rank0=count,
        spike=validated(SpikeSettings, SpikeSettings.model_validate, spike, raw_source),
        parallel=parallel,
        worker=worker,
        dp_rank_files=_rank_files(directory, parallel, count),
        sizes=file_sizes(directory),
        imported=imported,
    )


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise IncompleteSnapshotError(
            fault(path, None, "no such directory", "a snapshot directory (iter_*)")
        )
    inside = [name for root in _ROOTS for name in _snapshots_in(path, root)]
    if inside:
        found = "1 snapshot in it" if len(inside) == 1 else f"{len(inside)} snapshots in it"
        then = f"Name one of: {', '.join(inside)}."
        raise SnapshotError(fault(path, None, found, "one snapshot's own directory", then))
    return path


#: Where snapshots lie in a root of them, in the directory above it, and in an output directory.
_ROOTS = (
    Path(),
    *(
        Path(above, root)
        for above in ("", layout.CHECKPOINTS)
        for root in (layout.SNAPSHOT_ROOT, layout.PRESERVED_ROOT)
    ),
)


def _snapshots_in(path: Path, root: Path) -> list[str]:
    """Snapshots directly below ``path / root``, named as seen from ``path``."""
    if not (path / root).is_dir():
        return []
    with os.scandir(path / root) as entries:
        names = [entry.name for entry in entries if entry.name.startswith("iter_")]
    return sorted(str(root / name) for name in names if layout.step_of(Path(name)) is not None)


def _read_metadata(directory: Path) -> tuple[dict[str, Any], Path, bool]:
    """AXRL's metadata, the file it came from, and whether that is the legacy place."""
    modern = directory / layout.AXRL_METADATA
    if modern.exists():
        return read_json(modern, _METADATA_IS), modern, False
    shared = directory / layout.MEGATRON_METADATA
    if not shared.exists():
        raise missing(modern, _METADATA_IS)
    found = read_json(shared, _METADATA_IS)
    if "sharded_backend" in found:  # Megatron's own: AXRL's was never written
        raise missing(modern, _METADATA_IS)
    return found, shared, True


def _worker_config(
    directory: Path, metadata: dict[str, Any], source: Path
) -> tuple[dict[str, Any], Path]:
    own = directory / layout.WORKER_CONFIG
    if own.exists():
        return read_json(own, "the worker's settings"), own
    config = metadata.get("config")
    if not isinstance(config, dict):
        raise missing(own, "the worker's settings")
    return config, source


def _step(directory: Path, metadata: dict[str, Any], source: Path) -> int:
    step = integer(metadata, "global_step", source)
    if step is None:
        step = layout.step_of(directory)
    if step is None:
        raise SnapshotError(
            fault(source, "global_step", "nothing", "the step, here or in the directory's name")
        )
    return step


def _check_shared_files(directory: Path, legacy: bool) -> None:
    """The files that exist once; old snapshots may lack the trainer's."""
    needed = {
        layout.RUN_CONFIG: "the model's architecture",
        layout.DCP_METADATA: "the table of the checkpoint's tensors",
        layout.MEGATRON_METADATA: "Megatron's mark of a complete checkpoint",
        layout.TRAINER: "the trainer, which holds the loss settings",
    }
    if legacy:
        del needed[layout.TRAINER]
    for name, why in needed.items():
        if not (directory / name).is_file():
            raise missing(directory / name, why)
    if not legacy:
        _check_backend(directory / layout.MEGATRON_METADATA)
    if not any(directory.glob("*.distcp")):
        raise missing(directory / "__0_0.distcp", "the checkpoint's tensors")


def _check_backend(path: Path) -> None:
    backend = read_json(path, "Megatron's mark of a complete checkpoint").get("sharded_backend")
    if backend != "torch_dist":
        raise SnapshotError(fault(path, "sharded_backend", repr(backend), "'torch_dist'"))


def _rank_files(directory: Path, parallel: Parallel, count: int | None) -> tuple[RankFiles, ...]:
    """Every rank's batch must be there and whole; one rank is picked for each dp rank."""
    for rank in range(parallel.world_size):
        _check_whole(directory / layout.batch_file(rank), f"the batch of rank {rank}")
    if count:
        _check_whole(directory / layout.routing_file(0), f"{count} routing payloads of rank 0")
    return tuple(_files_of(directory, parallel, dp_rank) for dp_rank in range(parallel.dp))


def _files_of(directory: Path, parallel: Parallel, dp_rank: int) -> RankFiles:
    rank = parallel.first_rank(dp_rank)
    routing = directory / layout.routing_file(rank)
    grad_info = directory / layout.grad_info_file(rank)
    if routing.exists():
        _check_whole(routing, f"the routing payloads of rank {rank}")
    return RankFiles(
        dp_rank=dp_rank,
        rank=rank,
        batch=directory / layout.batch_file(rank),
        routing=routing if routing.exists() else None,
        grad_info=grad_info if grad_info.exists() else None,
    )


def _check_whole(path: Path, why: str) -> None:
    """The table at the end of a torch file is its last write: without it the file is cut short."""
    if not path.is_file():
        raise missing(path, why)
    with path.open("rb"):  # one that may not be read is no zip file to the next line
        pass
    if not zipfile.is_zipfile(path):
        found = f"{path.stat().st_size} bytes without the table that ends a whole file"
        raise IncompleteSnapshotError(fault(path, None, found, why, f"{COPY_AGAIN}."))
