"""Record gradient spikes while a model trains, in the layout that the replay reads.

Call :meth:`SpikeRecorder.observe` once a step, after the gradient norm is known and before the
optimizer moves the weights. Detection and defaults are AXRL's (``spike_debug``); beside the spikes
one quiet step of the same run is kept, the control that shows a mitigation's side effects.
Imports no torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from replay_lib import layout
from replay_lib.detect import SpikeDetector
from replay_lib.snapshot.model import SpikeSettings
from replay_lib.snapshot.write import write_snapshot

if TYPE_CHECKING:
    from replay_lib.snapshot.write import Content

    #: Makes what a snapshot holds, given the median norm; called only where one is written.
    MakeContent = Callable[[float | None], Content]


class Event(StrEnum):
    """What a step was."""

    SPIKE = "spike"  # recorded
    QUIET = "quiet"  # recorded as the quiet control
    ORDINARY = "ordinary"
    NON_FINITE = "non_finite"  # never recorded: there is no norm to reproduce


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One step as the recorder saw it.

    ``ratio`` is norm / median, None where either is missing or the median is not positive.
    ``path`` is the snapshot that was written, ``note`` what a log should say ("" mostly).
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

    One process of the job calls it (the weights of ``Content`` are whole tensors, the batches
    those of every data-parallel rank); one batch file a global rank is written. At most
    ``max_snapshots`` spikes are kept, oldest steps deleted first; below 1 all are kept. A step is
    quiet where its ratio is within ``quiet_tolerance`` of 1, and one is kept: a newer one takes its
    place once it is ``quiet_every`` steps old.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        spike: SpikeSettings | None = None,
        quiet_tolerance: float = 0.1,
        quiet_every: int = 100,
        history: Iterable[float | None] = (),
    ) -> None:
        """``history``: norms of earlier steps, where a run continues one."""
        self.spike = SpikeSettings(enabled=True) if spike is None else spike
        self.roots = {
            Event.SPIKE: Path(directory) / layout.SNAPSHOT_ROOT,
            Event.QUIET: Path(directory) / layout.QUIET_ROOT,
        }
        self.quiet_tolerance = quiet_tolerance
        self.quiet_every = quiet_every
        self.detector = SpikeDetector(
            warmup_steps=self.spike.warmup_steps,
            spike_ratio=self.spike.spike_ratio,
            history_window=self.spike.history_window,
            history=history,
        )

    def observe(self, step: int, norm: float | None, content: MakeContent) -> Observation:
        """Judge the step by its norm (L2, before clipping) and write what is to be kept.

        Training is never ended for a snapshot that is there already (a restarted run that comes by
        the same step): it is left as it is and the note says so. Errors of writing are raised.
        """
        if norm is None or not math.isfinite(norm):
            told = "missing" if norm is None else f"{norm}"
            note = f"step {step}: the gradient norm is {told}; nothing was recorded"
            return self._observation(step, norm, Event.NON_FINITE, None, note)
        is_spike = self.detector.observe(step, norm) and self.spike.enabled
        if is_spike:
            return self._keep(step, norm, Event.SPIKE, content)
        if self.spike.enabled and self._wanted_as_quiet(step, norm):
            return self._keep(step, norm, Event.QUIET, content)
        return self._observation(step, norm, Event.ORDINARY)

    def snapshots(self, event: Event) -> list[Path]:
        """What is kept as ``SPIKE`` or ``QUIET``, oldest step first."""
        root = self.roots[event]
        found = [(layout.step_of(p), p) for p in root.iterdir()] if root.is_dir() else []
        return [path for step, path in sorted((s, p) for s, p in found if s is not None)]

    def _ratio(self, norm: float | None) -> float | None:
        median = self.detector.median
        if norm is None or not math.isfinite(norm) or median is None or not median > 0.0:
            return None
        return norm / median

    def _wanted_as_quiet(self, step: int, norm: float) -> bool:
        ratio = self._ratio(norm)
        if step < self.spike.warmup_steps or ratio is None:
            return False
        kept = self.snapshots(Event.QUIET)
        last = layout.step_of(kept[-1]) if kept else None
        fresh = last is not None and step - last < self.quiet_every
        return not fresh and abs(ratio - 1.0) <= self.quiet_tolerance

    def _keep(self, step: int, norm: float, event: Event, content: MakeContent) -> Observation:
        path = self.roots[event] / layout.iter_dir(step)
        if path.exists():
            note = f"step {step}: {path} is there already and was left as it is"
            return self._observation(step, norm, event, path, note)
        write_snapshot(path, content(self.detector.median))
        self._rotate(event, 1 if event is Event.QUIET else self.spike.max_snapshots)
        return self._observation(step, norm, event, path)

    def _rotate(self, event: Event, limit: int) -> None:
        """Delete the oldest; each under another name first, so none is ever found in part."""
        kept = self.snapshots(event)
        for path in kept[: max(len(kept) - limit, 0)] if limit >= 1 else []:
            doomed = path.with_name(f".{path.name}.old")
            path.rename(doomed)
            shutil.rmtree(doomed)

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
