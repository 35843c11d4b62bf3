"""Rank 0's part of ``--backend axrl``: experiments become replay directories, answers outcomes."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from replay_lib import layout
from replay_lib.backend.directory import Recorded, read_recorded, write_replay_directory
from replay_lib.backend.seams import Routes, refuse_unexpressible, routes_of
from replay_lib.batch import RankBatch
from replay_lib.engine.apply import apply_patches
from replay_lib.engine.inputs import RankInput
from replay_lib.engine.protocol import Experiment, Outcome, SessionInfo
from replay_lib.engine.versions import versions
from replay_lib.engine.weights import NOT_MODEL
from replay_lib.loss import GrpoSettings
from replay_lib.methods import load_methods, resolve
from replay_lib.patch import Mitigation, Seam
from replay_lib.snapshot.checkpoint import SafeReader
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.trainers.names import AXRL

NOTES = (
    "replayed by AXRL's own MegatronWorker.reproduce_spike",
    "its digest is of the norms that AXRL tells, not of the gradient",
    "retained shares and carried old log-probabilities are not measured by this backend, so it "
    "proves no method",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An experiment's inputs after its patches, in terms that a directory can express."""

    experiment: Experiment
    batches: tuple[RankBatch, ...]
    settings: GrpoSettings
    routes: Routes
    touched: dict[Seam, int]


@dataclass(frozen=True)
class Prepared:
    """A snapshot that was read, the known methods, and where directories are written."""

    recorded: Recorded
    methods: Mapping[str, Mitigation]
    home: Path
    _numbers: Iterator[int] = field(default_factory=count)

    def plan(self, experiment: Experiment) -> Plan:
        """What ``experiment`` replays; PatchError where a directory cannot express it."""
        patches = [p for c in experiment.mitigations for p in resolve(c, self.methods)]
        refuse_unexpressible(experiment.name, patches)
        ranks = [_rank_input(batch, self.recorded) for batch in self.recorded.batches]
        patched = apply_patches(patches, ranks, self.recorded.settings)
        return Plan(
            experiment=experiment,
            batches=patched.batches,
            settings=patched.settings,
            routes=routes_of(experiment.name, patched.batches, patched.forced),
            touched=patched.touched,
        )

    @contextlib.contextmanager
    def directory(self, plan: Plan) -> Iterator[Path]:
        """The replay directory of ``plan``, gone when the block ends."""
        target = self.home / f"replay{next(self._numbers)}"
        # AXRL takes a directory of this name for one step's checkpoint
        path = target / layout.iter_dir(self.recorded.snapshot.step)
        try:
            yield write_replay_directory(
                path,
                self.recorded,
                batches=plan.batches,
                settings=plan.settings,
                routes=plan.routes,
            )
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def outcome(self, plan: Plan, answers: Sequence[Mapping[str, Any]], seconds: float) -> Outcome:
        """What the ranks' ``answers`` say; the norm is that of the whole gradient on each rank."""
        first = answers[0]
        told = "".join(str(answer["digest"]) for answer in answers)
        return Outcome(
            experiment=plan.experiment,
            grad_norm_preclip=float(first["norm"]),
            digest=hashlib.sha256(told.encode()).hexdigest(),
            loss=float("nan"),
            denominator=float("nan"),
            param_norms={},
            touched=plan.touched,
            nonfinite=(str(first["reason"]),) if first["reason"] else (),
            seconds=round(seconds, 3),
        )

    def info(self, seconds: float) -> SessionInfo:
        """What this session runs on."""
        snapshot = self.recorded.snapshot
        parallel = snapshot.parallel
        return SessionInfo(
            snapshot=str(snapshot.path),
            step=snapshot.step,
            fidelity="full",  # every rank's batch on the recorded layout
            dp_ranks=tuple(range(parallel.dp)),
            dp_recorded=parallel.dp,
            layout={n: getattr(parallel, n) for n in ("dp", "tp", "pp", "cp", "ep")},
            device=_device(),
            dtype="bfloat16" if snapshot.worker.bf16 else "float32",
            deterministic=False,  # AXRL switches no deterministic algorithm on
            parameters=_parameters(snapshot.path),
            versions=versions(),
            seconds={"start": seconds},
            notes=NOTES,
            trainer=AXRL,
            backend=AXRL,
        )


def prepare(snapshot: Path, mitigations: Sequence[str], home: Path) -> Prepared:
    """Read ``snapshot`` and the methods; the errors of reading pass."""
    return Prepared(read_recorded(open_snapshot(snapshot)), load_methods(mitigations or None), home)


def _rank_input(batch: RankBatch, recorded: Recorded) -> RankInput:
    """What patches see of one rank: its batch, and where the run itself forced saved routes."""
    worker = recorded.snapshot.worker
    forced = None
    if worker.enable_routing_replay:
        layers = next((int(r.shape[1]) for r in batch.routes if r is not None), 1)
        forced = torch.ones(*batch.input_ids.shape, layers, dtype=torch.bool)
        if worker.replay_routing_for_loss_tokens_only:
            forced &= batch.loss_mask.unsqueeze(-1)
    return RankInput(batch=batch, split=(), routes_BTLK=None, forced_BTL=forced)


def _parameters(path: Path) -> int:
    index = SafeReader(path).read_metadata()
    return sum(
        entry.size.numel()
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(NOT_MODEL)
    )


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda ({torch.cuda.get_device_name()})"
