"""Every file of a snapshot directory by itself: is it there, and can it be read?

This is what is left where a snapshot cannot be opened, and it names all that is wrong at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.analysis.findings import Finding, Place, finding, from_error
from replay_lib.errors import SpikeReplayError
from replay_lib.snapshot.documents import missing, read_json
from replay_lib.snapshot.model import Parallel, Snapshot
from replay_lib.snapshot.stated import parallel_from

#: Ranks without a batch that are named one by one.
NAMED = 20


def check_each_file(directory: Path) -> Iterator[Finding]:
    """Findings about every file that a snapshot has or should have, without opening it as one."""
    parallel = _stated_layout(directory)
    if parallel is not None:
        yield from _missing_ranks(directory, parallel)
        yield from extra_files(directory, parallel)
    present = sorted(p.name for p in directory.iterdir() if p.is_file())
    for name in dict.fromkeys([*_SHARED, *present]):
        yield from check_file(directory, name)


def _missing_ranks(directory: Path, parallel: Parallel) -> Iterator[Finding]:
    """The first ranks without a batch by name, how many more there are in one finding."""
    ranks = range(parallel.world_size)
    absent = [rank for rank in ranks if not (directory / layout.batch_file(rank)).is_file()]
    for rank in absent[:NAMED]:
        path = directory / layout.batch_file(rank)
        yield from_error(missing(path, f"the batch of rank {rank}"), path)
    if rest := absent[NAMED:]:
        found = f"no batches of {len(rest)} more ranks, up to {rest[-1]} of {len(ranks)}"
        yield finding("file-incomplete", layout.batch_file(rest[0]), found)


def check_file(directory: Path, name: str) -> Iterator[Finding]:
    """Whether one file can be read by its own reader; files without one are left alone."""
    path = directory / name
    ranked = layout.rank_file(path)
    read = _READERS.get(ranked[0] if ranked else name)
    if read is None:
        return
    try:
        read(path)
    except SpikeReplayError as error:
        yield from_error(error, path)


def extra_files(directory: Path, parallel: Parallel) -> Iterator[Finding]:
    """Files of ranks that the layout does not have."""
    for path in sorted(directory.iterdir()):
        ranked = layout.rank_file(path)
        if ranked is not None and ranked[1] >= parallel.world_size:
            found = f"rank {ranked[1]} of a run of {parallel.world_size} ranks"
            yield finding("rank-file-extra", path, found)


def check_copies(snapshot: Snapshot) -> Iterator[Finding]:
    """Ranks of one data-parallel group save the same batch and the same routes, rank by rank."""
    for rank in range(snapshot.parallel.world_size):
        dp_rank = snapshot.parallel.dp_rank(rank)
        first = snapshot.files_of(dp_rank)
        if rank == first.rank:
            continue
        for mine, theirs, read in (
            (layout.batch_file(rank), layout.batch_file(first.rank), _batch),
            (layout.routing_file(rank), layout.routing_file(first.rank), _payload),
        ):
            yield from _compare(snapshot.path, mine, theirs, read, dp_rank)


def _compare(
    directory: Path, mine: str, theirs: str, read: Callable[[Path], Any], dp_rank: int
) -> Iterator[Finding]:
    at = Place(dp_rank=dp_rank)
    there = [(directory / name).is_file() for name in (mine, theirs)]
    if not all(there):
        if any(there):
            yield finding("rank-copies-differ", mine, f"only one of it and {theirs} exists", at)
        return
    try:
        one, other = read(directory / mine), read(directory / theirs)
    except SpikeReplayError as error:
        yield from_error(error, mine, at)
        return
    if not _equal(one, other):
        yield finding("rank-copies-differ", mine, f"not the content of {theirs}", at)


def _equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # bit by bit: NaN equals itself here
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other)


def _stated_layout(directory: Path) -> Parallel | None:
    for name in (layout.WORKER_CONFIG, layout.AXRL_METADATA, layout.MEGATRON_METADATA):
        path = directory / name
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            config = raw if name == layout.WORKER_CONFIG else raw["config"]
            return parallel_from(config, path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, SpikeReplayError):
            continue
    return None


def _batch(path: Path) -> Any:
    """A batch's tensor columns; its handles are objects of a dead process."""
    from replay_lib.snapshot.axrl_files import read_batch

    return read_batch(path).columns


def _payload(path: Path) -> Any:
    from replay_lib.snapshot.routes import read_payload

    return read_payload(path)


def _plain(path: Path) -> Any:
    from replay_lib.snapshot.pickles import load_untrusted

    return load_untrusted(path, {}, "plain tensors and numbers")


def _trainer(path: Path) -> Any:
    from replay_lib.snapshot.pickles import load_untrusted
    from replay_lib.snapshot.stand_ins import trainer_table

    return load_untrusted(path, trainer_table(), "the trainer, which holds the loss settings")


def _table(path: Path) -> Any:
    from replay_lib.snapshot.dcp_metadata import read_table

    return read_table(path.parent)


def _model(path: Path) -> Any:
    from replay_lib.snapshot.run_config import read_model_fields

    return read_model_fields(path)


def _json(path: Path) -> Any:
    return read_json(path, "settings or metadata of the snapshot")


_SHARED = (layout.WORKER_CONFIG, layout.RUN_CONFIG, layout.TRAINER, layout.DCP_METADATA)
_READERS: dict[str, Callable[[Path], Any]] = {
    "batch": _batch,
    "routing_payload": _payload,
    "grad_info": _plain,
    layout.TRAINER: _trainer,
    layout.COMMON: _plain,
    layout.TRAIN_STATE: _plain,
    layout.WORKER_CONFIG: _json,
    layout.AXRL_METADATA: _json,
    layout.MEGATRON_METADATA: _json,
    layout.RUN_CONFIG: _model,
    layout.DCP_METADATA: _table,
}
