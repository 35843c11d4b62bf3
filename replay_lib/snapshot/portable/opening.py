"""Open a portable snapshot: schema version, files, then what it states about itself. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.errors import SnapshotError, fault
from replay_lib.snapshot.documents import file_sizes, missing
from replay_lib.snapshot.model import (
    Parallel,
    RankFiles,
    Snapshot,
    SpikeSettings,
    WorkerConfig,
    worker_from,
)
from replay_lib.snapshot.portable.manifest import Manifest, read_manifest
from replay_lib.snapshot.stated import integer, metadata_version, number, parallel_from, validated

FACTS_ARE = "step, norms and median of the recorded step"
WORKER_IS = "the worker's settings"


def open_portable(directory: Path) -> Snapshot:
    """Read and check the portable snapshot in ``directory``; see ``manifest`` for what when.

    Raises IncompleteSnapshotError naming a file that is absent or too short, SnapshotError where
    one was changed, is not listed, or says something it cannot.
    """
    manifest = read_manifest(directory)
    facts, source = _object(manifest, layout.PORTABLE_FACTS, FACTS_ARE)
    raw, raw_source = _object(manifest, layout.PORTABLE_WORKER, WORKER_IS)
    parallel = parallel_from(raw, raw_source)
    step = integer(facts, "step", source)
    if step is None:
        raise SnapshotError(fault(source, "step", "nothing", "the recorded step"))
    _check_shared_files(manifest)
    spike = raw.get("spike_debug") or {}
    return Snapshot(
        path=directory,
        step=step,
        grad_norm_preclip=number(facts, "grad_norm_preclip", source),
        grad_norm_median=number(facts, "grad_norm_median", source),
        spike_ratio_recorded=number(facts, "spike_ratio_recorded", source),
        metadata_version=metadata_version(facts, source),
        legacy=False,
        routing_payload_count_rank0=integer(facts, "routing_payload_count_rank0", source),
        spike=validated(SpikeSettings, SpikeSettings.model_validate, spike, raw_source),
        parallel=parallel,
        worker=validated(WorkerConfig, worker_from, raw, raw_source),
        dp_rank_files=tuple(_rank_files(manifest, parallel, d) for d in range(parallel.dp)),
        sizes=file_sizes(directory),
        portable=True,
    )


def _object(manifest: Manifest, name: str, why: str) -> tuple[dict[str, Any], Path]:
    found, path = manifest.document(name, why), manifest.directory / name
    if not isinstance(found, dict):
        raise SnapshotError(fault(path, None, f"a JSON {type(found).__name__}", why))
    return found, path


def _check_shared_files(manifest: Manifest) -> None:
    if not manifest.has(layout.PORTABLE_RUN_CONFIG):
        raise missing(manifest.directory / layout.PORTABLE_RUN_CONFIG, "the model's architecture")
    if not manifest.has(layout.portable_weights(1)):
        raise missing(manifest.directory / layout.portable_weights(1), "the model's parameters")


def _rank_files(manifest: Manifest, parallel: Parallel, dp_rank: int) -> RankFiles:
    directory, rank = manifest.directory, parallel.first_rank(dp_rank)
    for name in (layout.portable_columns(dp_rank), layout.portable_rows(dp_rank)):
        if not manifest.has(name):
            raise missing(directory / name, f"the batch of data-parallel rank {dp_rank}")
    routing, figures = layout.portable_routing(dp_rank), layout.portable_grad_info(rank)
    return RankFiles(
        dp_rank=dp_rank,
        rank=rank,
        batch=directory / layout.portable_columns(dp_rank),
        routing=directory / routing if manifest.has(routing) else None,
        grad_info=directory / figures if manifest.has(figures) else None,
    )
