"""Write a snapshot as a portable one, and a portable one as the trainer wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.errors import UsageError, fault
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.portable.codec import encode, to_bytes
from replay_lib.snapshot.portable.manifest import write_manifest
from replay_lib.snapshot.portable.reading import COLUMN, TREE
from replay_lib.snapshot.reader import reader_of
from replay_lib.snapshot.routes import distinct
from replay_lib.snapshot.write import read_content, whole_directory, write_snapshot

if TYPE_CHECKING:
    from torch import Tensor


def export_snapshot(snapshot: Snapshot, directory: str | Path) -> Snapshot:
    """Write ``snapshot`` as the portable snapshot ``directory`` and open that.

    Everything that a replay or an import needs is written: weights, one batch a data-parallel
    rank with its handles, routes and trees, settings, the model's configuration, all figures.
    Optimizer and RNG state are not. All of it is there in the end, or nothing. Weights go through
    memory one file at a time. Raises SnapshotError where the directory exists, and whatever
    reading the snapshot raises.
    """
    target = Path(directory)
    with whole_directory(target) as temporary:
        _write_all(temporary, snapshot)
    return open_snapshot(target)


def import_snapshot(snapshot: Snapshot, directory: str | Path) -> Snapshot:
    """Write the portable ``snapshot`` in the trainer's own layout as ``directory`` and open that.

    Each global rank of a data-parallel rank gets the same batch. UsageError where ``snapshot`` is
    in that layout already.
    """
    if not snapshot.portable:
        raise UsageError(
            fault(
                snapshot.path,
                None,
                "a snapshot in the trainer's own layout",
                f"what export wrote (a directory with {layout.PORTABLE})",
                "It needs no import: replay it as it is",
            )
        )
    return write_snapshot(directory, read_content(snapshot, keep_handles=True))


def _write_all(directory: Path, snapshot: Snapshot) -> None:
    from replay_lib.snapshot.checkpoint import iter_tensors
    from replay_lib.snapshot.portable.weights import write_weights

    reader = reader_of(snapshot)
    _write(directory / layout.PORTABLE_FACTS, _facts(snapshot))
    _write(directory / layout.PORTABLE_WORKER, reader.worker_config(snapshot))
    lines = {"lines": reader.run_config(snapshot).split("\n")}
    _write(directory / layout.PORTABLE_RUN_CONFIG, lines)
    if snapshot.trainer_file.is_file():
        _write(directory / layout.PORTABLE_TRAINER, {"config": reader.trainer_config(snapshot)})
    for rank in reader.grad_info_ranks(snapshot):
        _write(directory / layout.portable_grad_info(rank), reader.grad_info(snapshot, rank))
    for dp_rank in range(snapshot.parallel.dp):
        _write_batch(directory, snapshot, dp_rank)
    write_weights(directory, iter_tensors(snapshot.path))
    write_manifest(directory)


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    """What the trainer's metadata states beside the worker's configuration."""
    return {
        "step": snapshot.step,
        "grad_norm_preclip": snapshot.grad_norm_preclip,
        "grad_norm_median": snapshot.grad_norm_median,
        "spike_ratio_recorded": snapshot.spike_ratio_recorded,
        "metadata_version": snapshot.metadata_version,
        "routing_payload_count_rank0": snapshot.routing_payload_count_rank0,
    }


def _write_batch(directory: Path, snapshot: Snapshot, dp_rank: int) -> None:
    from replay_lib.snapshot.batches import load_batch
    from replay_lib.snapshot.portable.tensors import write

    load_batch(snapshot, dp_rank)  # what cannot be read is not exported
    reader = reader_of(snapshot)
    stored = reader.stored_batch(snapshot, dp_rank)
    tensors: dict[str, Tensor] = {f"{COLUMN}{n}": t for n, t in stored.columns.items()}

    def put(array: Tensor) -> str:
        name = f"{TREE}{sum(n.startswith(TREE) for n in tensors)}"
        tensors[name] = array
        return name

    document = encode({"paths": stored.paths, "trees": stored.trees}, put)
    (directory / layout.portable_rows(dp_rank)).write_bytes(to_bytes(document))
    write(directory / layout.portable_columns(dp_rank), tensors)
    payload = reader.stored_payload(snapshot, dp_rank)
    if payload and distinct(stored.paths):
        routes = {str(number): array for number, array in enumerate(payload)}
        write(directory / layout.portable_routing(dp_rank), routes)


def _write(path: Path, value: Any) -> None:
    path.write_bytes(to_bytes(encode(value)))
