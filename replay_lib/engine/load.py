"""Open a snapshot in the worker: read, check, build, load. Everything that is done once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from replay_lib.batch import RankBatch
from replay_lib.engine.auxiliary import auxiliary_scale
from replay_lib.engine.comm import Comm
from replay_lib.engine.effective import (
    difference_notes,
    effective_differences,
    planned_values,
    refuse_another_step,
    what_ran,
)
from replay_lib.engine.fitting import (
    Parameters,
    needed_bytes,
    refuse_idle_ranks,
    refuse_other_drops,
    refuse_what_cannot_be_split,
)
from replay_lib.engine.gradients import GradientCollector
from replay_lib.engine.groups import init_groups
from replay_lib.engine.inputs import (
    MicroBatch,
    RankInput,
    has_routes,
    idle_step,
    micro_batches,
    rank_input,
)
from replay_lib.engine.layout import Layout, same_as_recorded
from replay_lib.engine.live import live_values
from replay_lib.engine.memory import refuse_what_cannot_fit
from replay_lib.engine.model import LiveModel, build_model
from replay_lib.engine.model_config import ModelConfig, model_config
from replay_lib.engine.parts import part_of
from replay_lib.engine.protocol import Difference, Fidelity, Frozen, SessionInfo
from replay_lib.engine.refusals import refuse_run
from replay_lib.engine.routes import attach
from replay_lib.engine.sharing import counted_here
from replay_lib.engine.step import Loaded
from replay_lib.engine.tree_notes import rows_notes
from replay_lib.engine.trees import check_rows_option
from replay_lib.engine.versions import versions
from replay_lib.engine.weights import NOT_MODEL, canonical_names, load_weights, vocab_rows
from replay_lib.errors import UnsupportedModelError, UsageError
from replay_lib.layout import RUN_CONFIG
from replay_lib.microbatch import split_ranks
from replay_lib.snapshot import (
    Snapshot,
    load_batch,
    load_model_fields,
    load_settings,
    open_snapshot,
)
from replay_lib.snapshot.checkpoint import SafeReader
from replay_lib.snapshot.trainer import read_trainer_config
from replay_lib.trainers.loading import load_trainer
from replay_lib.trainers.names import GRPO


class OpenRequest(Frozen):
    """What a session is opened with; paths are absolute, ``dp_ranks`` None means all of them.

    ``rows``: recorded (rows that are prefix trees as the trainer packed them), merged (the same,
    but refused where no row is one) or unmerged (one row a path).
    Relative paths that methods are given start at ``paths_from``.
    ``layout`` holds the sizes of a :class:`Layout`, 1 where an axis is not named.
    """

    snapshot: str
    precision: str = "recorded"
    dp_ranks: tuple[int, ...] | None = None
    rows: Literal["recorded", "merged", "unmerged"] = "recorded"
    deterministic: bool = True
    layout: dict[str, int] = Field(default_factory=dict)
    mitigations: tuple[str, ...] = ()
    trainer: str = GRPO
    trainer_path: tuple[str, ...] = ()
    paths_from: str = "."
    python_path: tuple[str, ...] = ()


@dataclass
class Stopwatch:
    """Seconds of each named part of the start."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Book the time since the last lap under ``name``."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self.last, 3)
        self.last = now


def load(request: OpenRequest, comm: Comm, watch: Stopwatch) -> tuple[Loaded, SessionInfo]:
    """Load what ``request`` names onto this process's device.

    With several ranks each loads its shard of the model and its own part of the batches; what the
    layout cannot do is refused before that, on every rank alike.
    """
    snapshot = open_snapshot(Path(request.snapshot))
    refuse_run(snapshot)
    ran = what_ran(snapshot.worker, snapshot.parallel, load_model_fields(snapshot))
    fields = ran.fields
    with _refused_by_megatron(snapshot):
        config = model_config(fields, request.precision)
    planned = effective_differences(fields, planned_values(config))
    refuse_another_step(planned, allowed=_asked_for(request, replay=True))
    dp_ranks = _dp_ranks(snapshot, request.dp_ranks)
    layout = Layout(**request.layout)
    index = SafeReader(snapshot.path).read_metadata()
    vocab = vocab_rows(index, snapshot.path)
    refuse_idle_ranks(layout, len(dp_ranks), snapshot.path)
    refuse_what_cannot_be_split(layout, config, vocab)
    refuse_other_drops(layout, config, snapshot.parallel, snapshot.path)
    settings = load_settings(snapshot)
    trainer = load_trainer(request.trainer, read_trainer_config(snapshot), request.trainer_path)
    batches = {r: load_batch(snapshot, r) for r in range(snapshot.parallel.dp)}
    check_rows_option(request.rows, list(batches.values()), snapshot.path)
    splits = _splits(snapshot, [batches[r] for r in sorted(batches)], fields)
    watch.lap("snapshot")
    tokens = max(sum(batch.lengths()) for batch in batches.values())
    _check_memory(index, config, snapshot, layout, comm.device, most=tokens)
    comm = replace(comm, groups=init_groups(layout))
    replay = snapshot.worker.enable_routing_replay and any(config.moe_layers)
    with _refused_by_megatron(snapshot):
        model = build_model(
            config, vocab=vocab, replay=replay, device=comm.device, groups=comm.groups
        )
    differences = effective_differences(fields, live_values(model))
    refuse_another_step(differences, allowed=_asked_for(request, replay))
    if replay:
        attach(model)
    watch.lap("model")
    pieces = load_weights(model.module, snapshot.path, comm.gather)
    watch.lap("weights")
    ranks = [
        rank_input(
            batches[r],
            splits[r],
            model,
            replay=replay,
            loss_tokens_only=snapshot.worker.replay_routing_for_loss_tokens_only,
        )
        for r in dp_ranks[comm.groups.dp.rank :: layout.dp]
    ]
    merged = any(comm.gather(any(rank.trees for rank in ranks)))
    loaded = Loaded(
        model=model,
        collector=GradientCollector(model.module, comm.groups),
        names=canonical_names(pieces),
        ranks=tuple(ranks),
        micro=tuple(_micro_batches(ranks, model, comm)),
        settings=settings,
        comm=comm,
        trainer=trainer,
        unmerged=tuple(_micro_batches(ranks, model, comm, unmerged=True)) if merged else (),
        rows="unmerged" if request.rows == "unmerged" else "merged",
        pieces=tuple(pieces),
        counted=counted_here(model),
        paths_from=Path(request.paths_from),
        auxiliary=auxiliary_scale(layout, snapshot.parallel),
    )
    watch.lap("batches")
    return loaded, _info(
        snapshot,
        loaded,
        config,
        dp_ranks=dp_ranks,
        deterministic=request.deterministic,
        seconds=watch.seconds,
        differences=ran.told + differences,
    )


def _asked_for(request: OpenRequest, replay: bool) -> tuple[str, ...]:
    """Fields of the model that this request wants otherwise than they ran."""
    dtype = ("params_dtype",) if request.precision != "recorded" else ()
    # a batch without routes is replayed as the trainer does it
    return dtype if replay else (*dtype, "moe_enable_routing_replay")


def _route_notes(snapshot: Snapshot, loaded: Loaded, config: ModelConfig) -> tuple[str, ...]:
    """Said where the run's setting and its batches disagree about routing replay."""
    if not snapshot.worker.enable_routing_replay or not any(config.moe_layers):
        return ()
    without = [r.batch.dp_rank for r in loaded.ranks if not has_routes(r.batch)]
    if not without:
        return ()
    return (
        f"the run had routing replay on, but the batches of dp ranks {without} hold no routes: "
        "their routers chose for themselves, as the trainer's did",
    )


def _micro_batches(
    ranks: Sequence[RankInput], model: LiveModel, comm: Comm, *, unmerged: bool = False
) -> list[MicroBatch]:
    """This rank's micro-batches, as many as on any rank: sharing experts takes all of them."""
    part = part_of(model)
    micro = micro_batches(ranks, comm.device, part, unmerged=unmerged)
    if comm.groups.ep.size > 1:
        idle = max(comm.gather(len(micro))) - len(micro)
        micro += [idle_step(comm.device, part)] * idle
    return micro


@contextlib.contextmanager
def _refused_by_megatron(snapshot: Snapshot) -> Iterator[None]:
    """What Megatron-Core says to a model section that contradicts itself, as one of our errors."""
    try:
        yield
    except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{snapshot.path / RUN_CONFIG}: no model can be built from the model section: "
            f"{type(error).__name__}: {error or 'an assertion of Megatron-Core'}"
        ) from error


def _dp_ranks(snapshot: Snapshot, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    recorded = snapshot.parallel.dp
    chosen = tuple(range(recorded)) if wanted is None else tuple(sorted(set(wanted)))
    unknown = [r for r in chosen if not 0 <= r < recorded]
    if unknown or not chosen:
        raise UsageError(
            f"{snapshot.path}: no data-parallel ranks {unknown or '(none given)'}; "
            f"the run had 0 to {recorded - 1}"
        )
    return chosen


def _splits(
    snapshot: Snapshot, batches: Sequence[RankBatch], fields: Mapping[str, Any]
) -> list[list[list[int]]]:
    """Micro-batches as the run split them: the count of a dynamic split depends on all ranks."""
    worker, parallel = snapshot.worker, snapshot.parallel
    return split_ranks(
        [b.lengths() for b in batches],
        [b.width for b in batches],
        dynamic=worker.use_dynamic_batch_size,
        micro_batch_size=worker.train_micro_batch_size,
        seq_length=worker.seq_length,
        vpp=parallel.vpp,
        group=parallel.micro_batch_group(fields),
    )


def _check_memory(
    index: Metadata,
    config: ModelConfig,
    snapshot: Snapshot,
    layout: Layout,
    device: torch.device,
    *,
    most: int,
) -> None:
    """``most``: tokens of the largest rank; no micro-batch has more, whatever its limit is."""
    sizes = {
        key: entry.size.numel()
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(NOT_MODEL)
    }
    experts = sum(n for key, n in sizes.items() if ".experts." in key and "shared" not in key)
    needed = needed_bytes(
        Parameters(dense=sum(sizes.values()) - experts, experts=experts),
        layout,
        bytes_each=getattr(torch, config.dtype).itemsize,
        tokens=min(most, snapshot.worker.train_micro_batch_size * snapshot.worker.seq_length),
        vocab=vocab_rows(index, snapshot.path),
        layers=int(config.transformer["num_layers"]),
        hidden=int(config.transformer["hidden_size"]),
    )
    refuse_what_cannot_fit(needed, device, layout)


def _fidelity(snapshot: Snapshot, dp_ranks: tuple[int, ...], layout: Layout, rows: str) -> Fidelity:
    """Decided here and nowhere else: which ranks' batches, on which layout, packed how.

    Trees that were recorded merged and are replayed unmerged are summed in another order, as
    batches on other ranks are.
    """
    if len(dp_ranks) < snapshot.parallel.dp:
        return "reduced"
    as_recorded = same_as_recorded(layout, snapshot.parallel) and rows != "unmerged"
    return "full" if as_recorded else "folded"


def _info(
    snapshot: Snapshot,
    loaded: Loaded,
    config: ModelConfig,
    *,
    dp_ranks: tuple[int, ...],
    deterministic: bool,
    seconds: dict[str, float],
    differences: tuple[Difference, ...],
) -> SessionInfo:
    layout = loaded.comm.groups.layout
    counted = loaded.counted or frozenset()
    own = sum(p.numel() for n, p in loaded.collector.parameters.items() if n in counted)
    return SessionInfo(
        snapshot=str(snapshot.path),
        step=snapshot.step,
        fidelity=_fidelity(snapshot, dp_ranks, layout, loaded.rows),
        dp_ranks=dp_ranks,
        dp_recorded=snapshot.parallel.dp,
        layout=layout.sizes,
        device=device_name(loaded.comm.device),
        dtype=config.dtype,
        deterministic=deterministic,
        parameters=int(loaded.comm.sums([own])[0]),
        versions=versions(),
        seconds=seconds,
        differences=differences,
        notes=difference_notes(differences)
        + loaded.trainer.notes
        + rows_notes(loaded, config.dtype)
        + _route_notes(snapshot, loaded, config),
        trainer=loaded.trainer.name,
    )


def device_name(device: torch.device) -> str:
    """``cpu``, or ``cuda`` with the name that the driver gives the GPU."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda ({torch.cuda.get_device_name(device)})"
