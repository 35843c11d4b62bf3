"""Write a snapshot in the trainer's own layout: all of it or none of it.

Everything goes to a temporary sibling directory, is flushed to disk, and is renamed as a whole.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.batch import RankBatch
from replay_lib.errors import SnapshotError, UsageError, fault
from replay_lib.snapshot.model import Parallel, Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.reader import reader_of
from replay_lib.snapshot.stated import parallel_from
from replay_lib.unfinished import flush, hidden_sibling, take_place_of

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.loss.settings import GrpoSettings
    from replay_lib.snapshot.write_rank import RowHandles


@dataclass(frozen=True, kw_only=True)
class Content:
    """All that a snapshot holds, as values.

    ``worker_config`` is AXRL's whole MegatronWorkerConfig as a dictionary and states the layout;
    ``run_config`` is Megatron-Bridge's YAML text. ``batches[d]`` is the batch of data-parallel
    rank d. ``tensors`` are whole parameters by checkpoint key (stacked layers, stacked experts).
    ``grad_info`` is by global rank. ``handles[d]`` says how each row's routes are spread over
    stored objects; None: one object a path. ``saved_settings`` is the trainer's configuration as it
    was read: keys that ``settings`` do not know are kept from there. ``remarks`` are written beside
    the keys of AXRL's metadata, which no reader of it minds.
    """

    step: int
    grad_norm_preclip: float | None
    grad_norm_median: float | None
    worker_config: dict[str, Any]
    run_config: str
    batches: tuple[RankBatch, ...]
    settings: GrpoSettings
    tensors: Mapping[str, Tensor]
    grad_info: Mapping[int, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    handles: tuple[tuple[RowHandles | None, ...], ...] | None = None
    saved_settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: Mapping[str, Any] = field(default_factory=dict)  # more keys of the metadata


def read_content(snapshot: Snapshot, *, keep_handles: bool = False) -> Content:
    """Everything of a snapshot but optimizer and RNG state, ready to be changed and written.

    With ``keep_handles`` the spread of routes over stored objects is kept; then change routes
    there, for ``batches`` no longer decide them. Else each path becomes one object.
    """
    from replay_lib.snapshot.batches import load_batch
    from replay_lib.snapshot.checkpoint import read_tensors
    from replay_lib.snapshot.trainer import (
        load_grad_info,
        load_settings,
        read_trainer_config,
    )

    reader = reader_of(snapshot)
    saved = reader.grad_info_ranks(snapshot)
    return Content(
        step=snapshot.step,
        grad_norm_preclip=snapshot.grad_norm_preclip,
        grad_norm_median=snapshot.grad_norm_median,
        worker_config=reader.worker_config(snapshot),
        run_config=reader.run_config(snapshot),
        batches=tuple(load_batch(snapshot, d) for d in range(snapshot.parallel.dp)),
        settings=load_settings(snapshot),
        saved_settings=read_trainer_config(snapshot),
        tensors=read_tensors(snapshot.path),
        grad_info={rank: load_grad_info(snapshot, rank) for rank in saved},
        handles=_saved_handles(snapshot) if keep_handles else None,
    )


def _saved_handles(snapshot: Snapshot) -> tuple[tuple[RowHandles | None, ...], ...]:
    from replay_lib.snapshot.batches import load_handles
    from replay_lib.snapshot.write_rank import saved_rows

    return tuple(saved_rows(*load_handles(snapshot, d)) for d in range(snapshot.parallel.dp))


def read_worker_config(snapshot: Snapshot) -> dict[str, Any]:
    """The worker's whole configuration as saved."""
    return reader_of(snapshot).worker_config(snapshot)


def write_snapshot(
    directory: str | Path,
    content: Content,
    *,
    legacy: bool = False,
    checkpoint: Callable[[Path], None] | None = None,
) -> Snapshot:
    """Write ``content`` as the snapshot directory ``directory`` and open it.

    ``legacy`` gives the old layout: AXRL's metadata in ``metadata.json``, over Megatron's.
    ``checkpoint`` is called with the directory, where it and not ``content.tensors`` makes the
    checkpoint in there.
    Raises SnapshotError where the directory exists already or the content contradicts its own
    layout; then, as after any other error, nothing is left behind.
    """
    target = Path(directory)
    parallel_of(content, target)
    with whole_directory(target) as temporary:
        write_content(temporary, target, content, legacy=legacy, checkpoint=checkpoint)
    return open_snapshot(target)


def write_content(
    directory: Path,
    target: Path,
    content: Content,
    *,
    legacy: bool = False,
    checkpoint: Callable[[Path], None] | None = None,
) -> None:
    """Every file of ``content`` into the existing ``directory``, which will be ``target``."""
    parallel = parallel_of(content, target)
    if checkpoint is None:
        _write_tensors(directory, target.name, content)
    else:
        checkpoint(directory)
    _write_beside(directory, content, parallel, legacy)


def parallel_of(content: Content, target: Path) -> Parallel:
    """The layout that the content states; a SnapshotError where its batches contradict it."""
    parallel = parallel_from(content.worker_config, target / layout.WORKER_CONFIG)
    if len(content.batches) != parallel.dp:
        raise SnapshotError(
            fault(target, "batches", str(len(content.batches)), f"dp_size = {parallel.dp}")
        )
    return parallel


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling that becomes ``target`` when the block ends well, else vanishes.

    SnapshotError where ``target`` exists, UsageError where it cannot be made or the place is full.
    """
    if target.exists():
        raise SnapshotError(fault(target, None, "a directory that exists", "a new name"))
    with ExitStack() as built:
        with _place_named(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = built.enter_context(hidden_sibling(target))
        with _place_named(target, _FULL):
            temporary.chmod(0o755)
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                flush(path)
            take_place_of(temporary, target)


#: What a file system says that has no room, or is gone.
_FULL = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO])


@contextmanager
def _place_named(target: Path, kinds: Container[int] | None = None) -> Iterator[None]:
    """Errors of the file system (those of ``kinds``, or all) as a UsageError about ``target``."""
    try:
        yield
    except OSError as error:
        if kinds is not None and error.errno not in kinds:
            raise  # a fault of something else in the block
        found = f"a place that cannot be written ({error.strerror or error})"
        expected = "a new directory where files can be made, with room for them"
        raise UsageError(fault(target, None, found, expected)) from error


def _write_tensors(directory: Path, name: str, content: Content) -> None:
    from replay_lib.snapshot.write_checkpoint import write_checkpoint

    write_checkpoint(directory, name, content.step, content.tensors)


def _write_beside(directory: Path, content: Content, parallel: Parallel, legacy: bool) -> None:
    """All that is not Megatron's checkpoint."""
    from replay_lib.snapshot.write_rank import handles_of

    counts = []
    for rank in range(parallel.world_size):
        dp_rank = parallel.dp_rank(rank)
        batch = content.batches[dp_rank]
        handles = content.handles[dp_rank] if content.handles else handles_of(batch)
        figures = content.grad_info.get(rank)
        counts.append(write_rank_files(directory, rank, batch, handles, figures))
    write_shared_files(directory, content, counts[0], legacy=legacy)


def write_rank_files(
    directory: Path,
    rank: int,
    batch: RankBatch,
    handles: Sequence[RowHandles | None],
    figures: Mapping[str, Mapping[str, float]] | None,
) -> int:
    """What GLOBAL rank ``rank`` saves beside its shard of the weights, into ``directory``.

    ``figures`` are its per-parameter figures (None: no such file). Returns the number of its
    routing payloads.
    """
    from replay_lib.snapshot.naming import save_named
    from replay_lib.snapshot.write_rank import write_batch, write_routing

    write_batch(directory / layout.batch_file(rank), batch, handles)
    count = write_routing(directory / layout.routing_file(rank), handles)
    if figures is not None:
        plain = {name: dict(values) for name, values in figures.items()}
        save_named(plain, directory / layout.grad_info_file(rank))
    return count


def write_shared_files(
    directory: Path, content: Content, count: int, *, legacy: bool = False
) -> None:
    """What rank 0 alone saves: configurations, loss settings, and metadata last.

    ``count`` is the number of rank 0's routing payloads.
    """
    from replay_lib.snapshot.write_checkpoint import write_train_state
    from replay_lib.snapshot.write_rank import write_trainer

    write_train_state(directory, content.step)
    (directory / layout.RUN_CONFIG).write_text(content.run_config, encoding="utf-8")
    write_trainer(directory / layout.TRAINER, content.settings, content.saved_settings)
    _write_json(directory / layout.WORKER_CONFIG, content.worker_config)
    metadata = _metadata(content)
    if legacy:
        _write_json(directory / layout.MEGATRON_METADATA, metadata)
    else:
        _write_json(directory / layout.AXRL_METADATA, _modern(metadata, count))


def _metadata(content: Content) -> dict[str, Any]:
    """Keys that every version of the trainer wrote."""
    norm, median = content.grad_norm_preclip, content.grad_norm_median
    return {
        "global_step": content.step,
        "grad_norm": norm,
        "grad_norm_median": median,
        "spike_ratio_actual": norm / median if norm is not None and median else None,
        "config": content.worker_config,
        **content.remarks,
    }


def _modern(metadata: dict[str, Any], count: int) -> dict[str, Any]:
    return {
        "metadata_version": 2,
        **metadata,
        "megatron_worker_config_file": layout.WORKER_CONFIG,
        "trainer_file": layout.TRAINER,
        "routing_payload_count_rank0": count,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    # bare NaN and Infinity on purpose: that is what the trainer writes
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
