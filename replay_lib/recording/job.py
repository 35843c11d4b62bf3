"""A training job as the recorder sees it: what a step's snapshot holds beside batch and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.batch import RankBatch
from replay_lib.errors import SpikeReplayError
from replay_lib.recording.columns import rank_batch
from replay_lib.recording.ranks import Ranks, together
from replay_lib.snapshot.model import Parallel, SpikeSettings
from replay_lib.snapshot.write import Content, write_rank_files, write_shared_files
from replay_lib.unfinished import flush

if TYPE_CHECKING:
    from replay_lib.loss.settings import GrpoSettings
    from replay_lib.recording.checkpoint import Blob, Piece
    from replay_lib.recording.describing import Checked
    from replay_lib.recording.figures import Figures

Batch = RankBatch | Mapping[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One rank's view of the job; made by ``megatron_job`` or ``torch_job`` on every rank.

    ``pieces`` gives views of the live weights that this rank holds, and byte objects that
    Megatron's loader asks for; ``figures`` its per-parameter figures. Both are asked only where a
    snapshot is written (``pieces`` once before, to be checked). ``worker_config`` is by AXRL's
    names, ``run_config`` YAML as Megatron-Bridge has it; ``stated`` says whether the user wrote
    fields of it, and all of it was not read off the live model.
    """

    parallel: Parallel
    worker_config: Mapping[str, Any]
    run_config: str
    stated: bool
    settings: GrpoSettings
    pieces: Callable[[], Iterable[Piece | Blob]]
    figures: Callable[[], Figures]


def check_job(job: Job, batch: Batch, ranks: Ranks) -> Checked:
    """What would go wrong when a snapshot is written or replayed; the same on all ranks."""
    from replay_lib.recording.checkpoint import check_places, gathered_places
    from replay_lib.recording.describing import Checked, Description, check_description

    own = ""
    try:
        rank_batch(batch, job.parallel.dp_rank(ranks.rank))
    except SpikeReplayError as error:
        own = str(error)
    if ranks.size != job.parallel.world_size:
        own = f"the layout has {job.parallel.world_size} ranks, but {ranks.size} observe"
    described = Description(job.worker_config, job.parallel, job.run_config, job.stated)
    # rank 0's is the one that a snapshot holds
    said = ranks.gathered((own, described if ranks.rank == 0 else None))
    told = [f"rank {r}: {wrong}" for r, (wrong, _) in enumerate(said) if wrong]
    if told:
        return Checked(told[0])
    places = gathered_places(ranks, job.pieces())
    wrong = check_places(places)
    if wrong:
        return Checked(wrong)
    return check_description(said[0][1], {key: whole for key, whole, _, _ in places})


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPart:
    """One rank's part of a step that is to be kept."""

    job: Job
    ranks: Ranks
    spike: SpikeSettings
    step: int
    norm: float
    median: float | None
    batch: Batch

    def write(self, directory: Path) -> None:
        """All that this rank saves, on the disk when it returns; all ranks call this.

        Raises UnwrittenError on all ranks where one of them failed, never on some alone.
        """
        from replay_lib.recording.checkpoint import save_pieces
        from replay_lib.recording.figures import judged
        from replay_lib.snapshot.write_rank import handles_of

        job, ranks = self.job, self.ranks
        pieces, batch, figures = together(ranks, self._own)
        name = layout.iter_dir(self.step)
        together(ranks, lambda: save_pieces(directory, name, self.step, pieces, ranks))
        remarks = {} if figures is None else judged(figures, self.norm, ranks)

        def rest() -> None:
            handles = handles_of(batch)
            by_name = None if figures is None else figures.by_name
            count = write_rank_files(directory, ranks.rank, batch, handles, by_name)
            if ranks.rank == 0:
                write_shared_files(directory, self._content(job, batch, remarks), count)
            self._flush(directory)

        together(ranks, rest)

    def _own(self) -> tuple[list[Piece | Blob], RankBatch, Figures | None]:
        job = self.job
        figures = job.figures() if self.spike.save_per_param_grads else None
        batch = rank_batch(self.batch, job.parallel.dp_rank(self.ranks.rank))
        return list(job.pieces()), batch, figures

    def _flush(self, directory: Path) -> None:
        """Wait until this rank's files are on its disk; of the shared ones, those of rank 0."""
        for path in directory.iterdir():
            owner = layout.rank_file(path)
            if (owner[1] if owner else 0) == self.ranks.rank:
                flush(path)

    def _content(self, job: Job, batch: RankBatch, remarks: Mapping[str, Any]) -> Content:
        return Content(
            step=self.step,
            grad_norm_preclip=self.norm,
            grad_norm_median=self.median,
            worker_config={**job.worker_config, "spike_debug": self.spike.model_dump()},
            run_config=job.run_config,
            batches=(batch,),
            settings=job.settings,
            tensors={},
            remarks=remarks,
        )
