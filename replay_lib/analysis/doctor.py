"""Read a whole snapshot without a model and tell everything that is wrong with it.

Ranks and parameters are read one at a time. Whatever a reader refuses becomes a finding, so one
broken file does not hide the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.analysis.codes import CODES, Severity
from replay_lib.analysis.findings import Finding, Place, finding, from_error
from replay_lib.detect import is_spike
from replay_lib.errors import BatchError, SpikeReplayError
from replay_lib.rule import ratio_of, relative_difference
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot

if TYPE_CHECKING:
    from replay_lib.analysis.routes import RouterShape
    from replay_lib.batch import RankBatch
    from replay_lib.loss import GrpoSettings
    from replay_lib.snapshot.imported import Imported

#: A recorded ratio is one division in double precision.
RATIO_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Examined:
    """All findings, the worst first, and what they were looked for in (``read``: counts)."""

    snapshot: Path
    findings: tuple[Finding, ...]
    read: dict[str, int]

    def count(self, severity: Severity) -> int:
        """Findings of one severity."""
        return sum(f.severity is severity for f in self.findings)

    @property
    def codes(self) -> frozenset[str]:
        """Codes that were found."""
        return frozenset(f.code for f in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {
            "snapshot": str(self.snapshot),
            "findings": [f.as_json() for f in self.findings],
            "counts": {str(s): self.count(s) for s in Severity},
            "read": self.read,
        }


@dataclass
class _Chart:
    """What is known so far about one snapshot."""

    snapshot: Snapshot
    findings: list[Finding] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    settings: GrpoSettings | None = None
    vocab: int | None = None
    lengths: dict[int, list[int]] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    padding: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: dict[int, list[int]] = field(default_factory=dict)
    moves: bool = False  # some advantage is not zero
    read: dict[str, int] = field(default_factory=dict)

    def add(self, found: Iterable[Finding], file: str | Path, at: Place | None = None) -> None:
        """Collect findings; what stops their iterator is one too."""
        try:
            self.findings.extend(found)
        except SpikeReplayError as error:
            self.findings.append(from_error(error, file, at or Place()))

    def tally(self, name: str, count: int) -> None:
        self.read[name] = self.read.get(name, 0) + count


def examine(path: str | Path) -> Examined:
    """Everything that can be found in the snapshot directory ``path`` without a model.

    Raises SnapshotError only where ``path`` is no directory or holds several snapshots.
    """
    directory = Path(path)
    try:
        snapshot = open_snapshot(directory)
    except SpikeReplayError as error:
        if not directory.is_dir() or any(
            layout.step_of(p) is not None for p in directory.iterdir()
        ):
            raise
        return _unopened(directory, error)
    chart = _Chart(snapshot)
    for examination in _EXAMINATIONS:
        examination(chart)
    chart.tally("files", len(snapshot.sizes))
    return Examined(snapshot=directory, findings=in_order(chart.findings), read=chart.read)


def _unopened(directory: Path, error: SpikeReplayError) -> Examined:
    from replay_lib.analysis.files import check_each_file

    found = [] if layout.is_portable(directory) else list(check_each_file(directory))
    file = _file_in(str(error), directory)
    if file not in {f.file for f in found}:
        found.append(from_error(error, file))
    files = sum(1 for p in directory.iterdir() if p.is_file())
    return Examined(snapshot=directory, findings=in_order(found), read={"files": files})


def _file_in(text: str, directory: Path) -> str:
    """The file that an error's text begins with."""
    return text.split(":", 1)[0].removeprefix(f"{directory}/")


def in_order(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once, the worst first."""
    order, severities = list(CODES), list(Severity)
    unique = dict.fromkeys(found)
    return tuple(
        sorted(unique, key=lambda f: (severities.index(f.severity), order.index(f.code), f.file))
    )


def _metadata(chart: _Chart) -> None:
    from replay_lib.analysis.files import check_copies, check_file, extra_files

    snapshot = chart.snapshot
    source = layout.MEGATRON_METADATA if snapshot.legacy else layout.AXRL_METADATA
    source = layout.PORTABLE_FACTS if snapshot.portable else source
    if snapshot.imported is None:
        chart.add(_norms(snapshot, source), source)
    else:
        chart.findings.append(_imported(snapshot.imported))
    if snapshot.portable:  # every file is listed, and read by what follows
        return
    chart.add(extra_files(snapshot.path, snapshot.parallel), source)
    chart.add(check_copies(snapshot), source)
    for name in snapshot.sizes:  # those that nothing else here reads
        ranked = layout.rank_file(Path(name))
        others = (layout.COMMON, layout.TRAIN_STATE)
        if name in others or (ranked is not None and ranked[0] == "grad_info"):
            chart.add(check_file(snapshot.path, name), name)


def _imported(imported: Imported) -> Finding:
    lost = ", ".join(imported.missing)
    return finding("imported", layout.IMPORTED, f"a {imported.format} dump, without {lost}")


def _norms(snapshot: Snapshot, source: str) -> Iterator[Finding]:
    norm, median = snapshot.grad_norm_preclip, snapshot.grad_norm_median
    if snapshot.legacy:
        yield finding("metadata-legacy", source, "no axrl_metadata.json")
    if norm is None:
        yield finding("norm-missing", source, "grad_norm is null or absent")
    elif not (math.isfinite(norm) and norm >= 0):
        yield finding("norm-not-finite", source, f"grad_norm is {norm}")
    if ratio_of(1.0, median) is None:
        yield finding("median-undefined", source, f"grad_norm_median is {median}")
        return
    if norm is None or not (math.isfinite(norm) and norm >= 0):
        return
    ratio, recorded = ratio_of(norm, median), snapshot.spike_ratio_recorded
    if recorded is not None and ratio is not None:
        off = relative_difference(recorded, ratio)
        if off is None or not off <= RATIO_TOLERANCE:
            found = f"spike_ratio_actual is {recorded}, norm / median {ratio:.10g}"
            yield finding("ratio-differs", source, found)
    if not is_spike(norm, median, snapshot.spike.spike_ratio):
        found = f"{norm:.6g} is {ratio:.3g} x the median, spike_ratio is "
        yield finding("norm-below-detector", source, f"{found}{snapshot.spike.spike_ratio:g}")


def _settings(chart: _Chart) -> None:
    from replay_lib.analysis.config import check_config, check_unread
    from replay_lib.engine.field_values import possible_values
    from replay_lib.snapshot.run_config import load_model_fields
    from replay_lib.snapshot.trainer import read_settings, read_trainer_config
    from replay_lib.snapshot.write import read_worker_config

    snapshot = chart.snapshot
    if snapshot.imported is not None:  # it has none, which is told already
        return
    unknown: tuple[str, ...] = ()
    raw: Mapping[str, Any] = {}
    try:
        raw = read_trainer_config(snapshot)
        saved = read_settings(snapshot)
        chart.settings, unknown = saved.settings, saved.unknown
        chart.settings.check()
    except SpikeReplayError as error:
        chart.findings.append(from_error(error, layout.TRAINER))
    worker = read_worker_config(snapshot)
    chart.add(check_unread(worker, snapshot, raw, unknown), layout.TRAINER)
    try:
        fields = load_model_fields(snapshot)
    except SpikeReplayError as error:
        chart.findings.append(from_error(error, layout.RUN_CONFIG))
        return
    chart.add(check_config(snapshot, fields), layout.RUN_CONFIG)
    chart.fields = possible_values(fields)


def _weights(chart: _Chart) -> None:
    from replay_lib.analysis.weights import check_names, check_values, embedding_rows
    from replay_lib.snapshot.checkpoint import stored_table

    path = chart.snapshot.path
    if chart.snapshot.imported is not None:
        return
    try:
        chart.vocab = embedding_rows(path)
        chart.tally("parameters", len(stored_table(path)))
    except SpikeReplayError as error:
        chart.findings.append(from_error(error, layout.DCP_METADATA))
        return
    if chart.fields:
        chart.add(check_names(path, chart.fields), layout.DCP_METADATA)
    chart.add(check_values(path), layout.DCP_METADATA)


def _batches(chart: _Chart) -> None:
    from replay_lib.snapshot.batches import load_batch

    for files in chart.snapshot.dp_rank_files:
        at = Place(dp_rank=files.dp_rank)
        try:
            batch = load_batch(chart.snapshot, files.dp_rank)
        except SpikeReplayError as error:
            chart.findings.append(from_error(error, files.batch, at))
            continue
        _batch(chart, batch)
    chart.add(_repeated(chart), layout.batch_file(0))
    imported = chart.snapshot.imported
    filled = imported is not None and "advantage" in imported.missing  # with zeros
    if chart.rows and not chart.moves and not filled:
        found = "advantage is zero at every loss token of every rank"
        chart.findings.append(finding("advantage-zero", layout.batch_file(0), found))


def _batch(chart: _Chart, batch: RankBatch) -> None:
    from replay_lib.analysis.columns import check_columns
    from replay_lib.analysis.routes import check_rank_routes
    from replay_lib.analysis.trees import check_trees

    files = chart.snapshot.files_of(batch.dp_rank)
    at = Place(dp_rank=batch.dp_rank)
    lengths, index = batch.lengths(), batch.index.tolist()
    chart.lengths[batch.dp_rank], chart.widths[batch.dp_rank] = lengths, batch.width
    # the packed total is a multiple of 128; its tail is padding too
    padded = sum(n for n, i in zip(lengths, index, strict=True) if i < 0)
    chart.padding[batch.dp_rank] = padded, sum(lengths)
    chart.rows[batch.dp_rank] = [i for i in index if i >= 0]
    chart.moves |= bool((batch.advantage[batch.loss_mask] != 0).any())
    chart.tally("ranks", 1)
    chart.tally("rows", batch.rows)
    chart.tally("tokens", sum(lengths))
    chart.tally("loss_tokens", int(batch.loss_mask.sum()))
    columns = check_columns(batch, files.batch, chart.settings, chart.vocab)
    if chart.snapshot.imported is not None:  # what a dump does not hold is told already
        columns = (one for one in columns if one.code != "column-absent")
    chart.add(columns, files.batch, at)
    replayed = chart.snapshot.worker.enable_routing_replay
    chart.add(check_trees(batch, files.batch, replayed=replayed), files.batch, at)
    if (shape := _router_shape(chart)) is not None:
        routing = files.routing or files.batch
        found = check_rank_routes(batch, routing, shape, replayed=replayed)
        chart.add(found, routing, at)


def _router_shape(chart: _Chart) -> RouterShape | None:
    from replay_lib.analysis.routes import router_shape

    try:
        return router_shape(chart.fields)
    except SpikeReplayError:  # told with the model section
        return None


def _repeated(chart: _Chart) -> Iterator[Finding]:
    seen: dict[int, int] = {}
    for dp_rank, rows in chart.rows.items():
        again = sorted({row for row in rows if row in seen})
        if again:
            found = f"{len(again)} rows of dp rank {seen[again[0]]}, window row {again[0]} first"
            file = chart.snapshot.files_of(dp_rank).batch
            yield finding("rows-repeated", file, found, Place(dp_rank=dp_rank))
        seen |= {row: dp_rank for row in rows if row not in seen}


def _across_ranks(chart: _Chart) -> None:
    from replay_lib.analysis.config import check_balance, check_packed_lengths

    snapshot = chart.snapshot
    chart.add(check_balance(snapshot, chart.fields, chart.padding), layout.RUN_CONFIG)
    chart.add(check_packed_lengths(snapshot, chart.lengths), layout.RUN_CONFIG)


def _losses(chart: _Chart) -> None:
    """A second reading: how one rank's rows are split depends on all ranks' lengths."""
    from replay_lib.analysis.capacity import check_capacity
    from replay_lib.analysis.losses import check_losses
    from replay_lib.microbatch import split_ranks
    from replay_lib.snapshot.batches import load_batch

    snapshot, worker = chart.snapshot, chart.snapshot.worker
    if chart.settings is None or len(chart.lengths) < snapshot.parallel.dp:
        return
    ranks = sorted(chart.lengths)
    try:
        splits = split_ranks(
            [chart.lengths[r] for r in ranks],
            [chart.widths[r] for r in ranks],
            dynamic=worker.use_dynamic_batch_size,
            micro_batch_size=worker.train_micro_batch_size,
            seq_length=worker.seq_length,
            vpp=snapshot.parallel.vpp,
            group=snapshot.parallel.micro_batch_group(chart.fields),
        )
    except BatchError as error:
        chart.findings.append(from_error(error, layout.WORKER_CONFIG))
        return
    for dp_rank, split in zip(ranks, splits, strict=True):
        file = snapshot.files_of(dp_rank).batch
        chart.tally("micro_batches", len(split))
        batch = load_batch(snapshot, dp_rank)
        at = Place(dp_rank=dp_rank)
        chart.add(check_losses(batch, split, file, chart.settings), file, at)
        if (shape := _router_shape(chart)) is not None:
            found = check_capacity(batch, split, file, chart.fields, shape)
            chart.add(found, file, at)


_EXAMINATIONS: tuple[Callable[[_Chart], None], ...] = (
    _metadata,
    _settings,
    _weights,
    _batches,
    _across_ranks,
    _losses,
)
