"""Record gradient spikes while a model trains, in the layout that the replay reads.

Call :meth:`SpikeRecorder.observe` once a step on every rank, after the gradient norm is known and
before clipping and the optimizer's step. Detection and defaults are AXRL's (``spike_debug``);
beside the spikes one quiet step of the same run is kept, the control that shows a mitigation's
side effects. Imports no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from replay_lib import layout
from replay_lib.detect import SpikeDetector
from replay_lib.errors import UsageError, fault
from replay_lib.recording import place
from replay_lib.recording.documents import StepSettings
from replay_lib.recording.job import Batch, Job, StepPart, check_job
from replay_lib.recording.megatron import megatron_job
from replay_lib.recording.plain import torch_job
from replay_lib.recording.ranks import Ranks, UnwrittenError, join_ranks, together
from replay_lib.snapshot.model import SpikeSettings
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.write import write_content
from replay_lib.unfinished import flush, hidden_sibling, take_place_of

if TYPE_CHECKING:
    from replay_lib.snapshot.write import Content

__all__ = [
    "Event",
    "Observation",
    "SpikeRecorder",
    "SpikeSettings",
    "StepSettings",
    "megatron_job",
    "torch_job",
]

#: Makes what a snapshot holds, given the median norm; called only where one is written.
MakeContent = Callable[[float | None], "Content"]

#: Ranks have the same norm, up to a reduction in another order.
SAME_NORM = 1e-6
_LOG = logging.getLogger(__name__)


class Event(StrEnum):
    """What a step was."""

    SPIKE = "spike"
    QUIET = "quiet"  # wanted as the quiet control
    ORDINARY = "ordinary"
    NON_FINITE = "non_finite"  # never recorded: there is no norm to reproduce
    DISAGREED = "disagreed"  # ranks told different norms or steps: nothing is recorded


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One step as the recorder saw it.

    ``ratio`` is norm / median, None where either is missing or the median is not positive.
    ``path`` is the snapshot of the step, None where there is none (a spike that could not be
    written, too), ``note`` what a log should say ("" mostly).
    """

    step: int
    norm: float | None
    median: float | None
    ratio: float | None
    event: Event
    path: Path | None = None
    note: str = ""


class SpikeRecorder:
    """Writes ``spike_snapshots/iter_*`` and ``quiet_snapshots/iter_*`` under ``directory``.

    Every rank of a job makes one (at the same point: they form a group) and observes every step
    with its own batch; each writes its own batch, figures and share of the weights, and rank 0
    gives the whole its name when all have finished. A process without a job hands over whole
    contents instead.

    At most ``spike.max_snapshots`` spikes are kept, oldest steps deleted first; below 1 all are
    kept. A step is quiet where its ratio is within ``quiet_tolerance`` of 1, and one is kept: a
    newer one takes its place once it is ``quiet_every`` steps old (below 1: none is kept).
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        job: Job | None = None,
        spike: SpikeSettings | None = None,
        quiet_tolerance: float = 0.1,
        quiet_every: int = 100,
        history: Iterable[float | None] = (),
        raise_failures: bool = False,
    ) -> None:
        """``history``: norms of earlier steps, where a run continues one.

        What a killed run left half written under ``directory`` is deleted. A snapshot that cannot
        be written is told once through ``logging`` and in the observation's note, and training
        goes on; with ``raise_failures`` the error is raised.
        """
        self.spike = SpikeSettings(enabled=True) if spike is None else spike
        self.roots = {
            Event.SPIKE: Path(directory) / layout.SNAPSHOT_ROOT,
            Event.QUIET: Path(directory) / layout.QUIET_ROOT,
        }
        self.job = job
        self.ranks = Ranks() if job is None else join_ranks()
        self.quiet_tolerance = quiet_tolerance
        self.quiet_every = quiet_every
        self.raise_failures = raise_failures
        self.detector = SpikeDetector(
            warmup_steps=self.spike.warmup_steps,
            spike_ratio=self.spike.spike_ratio,
            history_window=self.spike.history_window,
            history=history,
        )
        self._checked = job is None
        self._warned = False
        if self.ranks.rank == 0 and self.spike.enabled:
            for event, root in self.roots.items():
                place.clear(root, self._limit(event))
        quiet = self.snapshots(Event.QUIET)
        last = layout.step_of(quiet[-1]) if quiet else None
        self._last_quiet: int | None = self.ranks.from_first(last)

    def observe(self, step: int, norm: float | None, batch: Batch | MakeContent) -> Observation:
        """Judge the step by its norm (L2 of all ranks, before clipping) and write what is kept.

        ``batch`` is this rank's, a RankBatch or a mapping of its columns, with the old
        log-probabilities that the step used; without a job, a function that makes the whole
        content. At the first step batch, weights and fields are checked, on all ranks at once, and
        a mistake is a UsageError: it would show at a spike otherwise, in the night. What the engine
        does not model is a warning: another backend may.
        """
        self._check_first(batch)
        told = self.ranks.gathered((step, norm))
        if not all(one[0] == step and _same(one[1], norm) for one in told):
            said = ", ".join(f"{n} at step {s}" for s, n in told)
            note = f"step {step}: the ranks told different norms ({said}); nothing was recorded"
            self._warn(note)
            return self._observation(step, norm, Event.DISAGREED, None, note)
        norm = told[0][1]  # to the last bit the same on all
        if norm is None or not math.isfinite(norm):
            said = "missing" if norm is None else f"{norm}"
            note = f"step {step}: the gradient norm is {said}; nothing was recorded"
            return self._observation(step, norm, Event.NON_FINITE, None, note)
        event = self._event(step, norm)
        if event is Event.ORDINARY:
            return self._observation(step, norm, event)
        return self._keep(step, norm, event, batch)

    def snapshots(self, event: Event) -> list[Path]:
        """What is kept as ``SPIKE`` or ``QUIET``, oldest step first."""
        return place.kept(self.roots[event])

    def _check_first(self, batch: Batch | MakeContent) -> None:
        if self._checked or self.job is None:
            return
        self._checked = True
        if callable(batch):
            raise UsageError(fault("recorder", "batch", "a function", "this rank's batch"))
        found = check_job(self.job, batch, self.ranks)
        if found.wrong:
            raise UsageError(found.wrong)
        if found.remark and self.ranks.rank == 0:
            _LOG.warning("%s", found.remark)

    def _event(self, step: int, norm: float) -> Event:
        """The same on every rank: it depends on nothing but norms that all of them had."""
        spike = self.detector.observe(step, norm)
        if not self.spike.enabled:
            return Event.ORDINARY
        if spike:
            return Event.SPIKE
        ratio, last = self._ratio(norm), self._last_quiet
        if step < self.spike.warmup_steps or ratio is None or self.quiet_every < 1:
            return Event.ORDINARY
        fresh = last is not None and step - last < self.quiet_every
        wanted = not fresh and abs(ratio - 1.0) <= self.quiet_tolerance
        return Event.QUIET if wanted else Event.ORDINARY

    def _ratio(self, norm: float | None) -> float | None:
        median = self.detector.median
        if norm is None or not math.isfinite(norm) or median is None or not median > 0.0:
            return None
        return norm / median

    def _limit(self, event: Event) -> int:
        return 1 if event is Event.QUIET else self.spike.max_snapshots

    def _keep(
        self, step: int, norm: float, event: Event, batch: Batch | MakeContent
    ) -> Observation:
        target = self.roots[event] / layout.iter_dir(step)
        if event is Event.QUIET:  # one that cannot be written is not tried again at every step
            self._last_quiet = step
        try:
            fresh = self._write(target, self._writer(step, norm, batch, target))
        except UnwrittenError as error:
            if self.raise_failures:
                raise error.__cause__ or UsageError(f"{target}: {error}") from error
            note = f"step {step}: {target} was not written ({error}); training goes on without it"
            self._warn(note)
            return self._observation(step, norm, event, None, note)
        if not fresh:
            note = f"step {step}: {target} is there already and was left as it is"
            return self._observation(step, norm, event, target, note)
        return self._observation(step, norm, event, target, self._rotate(event))

    def _writer(
        self, step: int, norm: float, batch: Batch | MakeContent, target: Path
    ) -> Callable[[Path], None]:
        """What fills the temporary directory; a job's is called by all ranks."""
        median = self.detector.median
        if self.job is not None and not callable(batch):
            part = StepPart(
                job=self.job,
                ranks=self.ranks,
                spike=self.spike,
                step=step,
                norm=norm,
                median=median,
                batch=batch,
            )
            return part.write
        make = batch
        assert callable(make), "a recorder without a job is given functions"

        def write(directory: Path) -> None:
            write_content(directory, target, make(median))
            for path in directory.iterdir():
                flush(path)

        return lambda directory: together(self.ranks, lambda: write(directory))

    def _write(self, target: Path, write: Callable[[Path], None]) -> bool:
        """Whether a new snapshot was made (False: there is one); UnwrittenError on all ranks."""
        ranks, first = self.ranks, self.ranks.rank == 0
        with ExitStack() as held:

            def begin() -> Path | None:
                if not first or target.exists():
                    return None
                target.parent.mkdir(parents=True, exist_ok=True)
                made = held.enter_context(hidden_sibling(target))
                made.chmod(0o755)
                return made

            temporary: Path | None = ranks.from_first(together(ranks, begin))
            if temporary is None:
                return False
            together(ranks, lambda: list(temporary.iterdir()))  # a disk that all ranks share
            write(temporary)

            def finish() -> None:
                if first:
                    open_snapshot(temporary)
                    flush(temporary)
                    take_place_of(temporary, target)

            together(ranks, finish)
        return True

    def _rotate(self, event: Event) -> str:
        if self.ranks.rank == 0:
            try:
                place.rotate(self.roots[event], self._limit(event))
            except OSError as error:
                note = f"an older snapshot could not be deleted ({error})"
                self._warn(note)
                return note
        return ""

    def _warn(self, note: str) -> None:
        if not self._warned and self.ranks.rank == 0:
            _LOG.warning("%s", note)
        self._warned = True

    def _observation(
        self, step: int, norm: float | None, event: Event, path: Path | None = None, note: str = ""
    ) -> Observation:
        return Observation(
            step=step,
            norm=norm,
            median=self.detector.median,
            ratio=self._ratio(norm),
            event=event,
            path=path,
            note=note,
        )


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    if not (math.isfinite(one) and math.isfinite(other)):
        return str(one) == str(other)
    return abs(one - other) <= SAME_NORM * abs(other)
