"""The parent's side: start a worker job with torchrun, send experiments, get outcomes.

The model never lives in this process. A worker that fails, dies, hangs or runs out of memory
becomes one EngineError that quotes the end of its log.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from replay_lib.engine.auto_layout import resolve_layout
from replay_lib.engine.early import check_before_start
from replay_lib.engine.job import WORKER
from replay_lib.engine.layout import AUTO, Layout
from replay_lib.engine.nodes import Nodes
from replay_lib.engine.protocol import Experiment, LayerRoutes, Outcome, SessionInfo
from replay_lib.engine.worker_job import START_TIMEOUT_S, WorkerJob
from replay_lib.errors import EngineError, UsageError, fault
from replay_lib.trainers.names import GRPO

#: The longest silence allowed while experiments run; progress is told after every group.
SILENCE_TIMEOUT_S = 1800.0


class ReplaySession:
    """One worker job for one snapshot; open once, run many experiments in it.

    ``info`` tells what it runs on. Use it as a context manager, or call ``close``.
    """

    info: SessionInfo

    def __init__(self, worker: WorkerJob, info: SessionInfo, silence_timeout_s: float) -> None:
        self._worker = worker
        self._silence = silence_timeout_s
        self._busy = False
        self.info = info

    @classmethod
    def open(
        cls,
        snapshot: Path | str,
        *,
        device: str = "auto",
        precision: str = "recorded",
        dp_ranks: Sequence[int] | None = None,
        rows: str = "recorded",
        layout: Layout | str = AUTO,
        deterministic: bool = True,
        mitigations: Sequence[Path | str] = (),
        trainer: str = GRPO,
        trainer_path: Sequence[Path | str] = (),
        paths_from: Path | str = ".",
        start_timeout_s: float = START_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
        worker_module: str = WORKER,
        nodes: Nodes | None = None,
    ) -> ReplaySession:
        """Start a worker and load ``snapshot`` in it.

        ``device``: cpu, cuda, or auto (cuda where a driver is found). ``precision``: recorded,
        float32 or bfloat16. ``dp_ranks``: a part of the recorded data-parallel ranks (a
        diagnostic, fidelity ``reduced``). ``rows``: how rows that are prefix trees are packed
        (recorded, merged or unmerged). ``layout``: how many processes, and along which axes they
        split model and batches; a text such as ``tp=2`` is read, and auto chooses (see
        ``engine/auto_layout.py``). ``mitigations``: directories beside the built-in one.
        ``trainer``: whose loss is replayed, grpo, axrl or module:factory; the worker alone imports
        it. ``trainer_path``: where module:factory has to come from, before all other places; by
        default wherever Python finds it. ``paths_from``: where relative paths that methods are
        given start. ``nodes``: the machines that replay together (None: this one alone). Raises the
        error that the worker met, or EngineError.
        """
        on = check_before_start(snapshot, device=device, rows=rows, trainer=trainer)
        number = nodes.number if nodes else 1
        where = Path(snapshot).resolve()
        chosen = resolve_layout(layout, where, on, precision, dp_ranks=dp_ranks, nodes=number)
        request = {
            "op": "open",
            "snapshot": str(where),
            "precision": precision,
            "dp_ranks": None if dp_ranks is None else list(dp_ranks),
            "rows": rows,
            "deterministic": deterministic,
            "layout": chosen.sizes,
            "mitigations": [str(Path(m).resolve()) for m in mitigations],
            "trainer": trainer,
            "trainer_path": [str(Path(p).resolve()) for p in trainer_path],
            "paths_from": str(Path(paths_from).resolve()),
            "python_path": [p or str(Path.cwd()) for p in sys.path],
        }
        return cls.start(
            request,
            device=on,
            ranks=chosen.ranks,
            start_timeout_s=start_timeout_s,
            silence_timeout_s=silence_timeout_s,
            worker_module=worker_module,
            nodes=nodes,
        )

    @classmethod
    def start(
        cls,
        request: dict[str, Any],
        *,
        device: str,
        ranks: int,
        start_timeout_s: float = START_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
        worker_module: str = WORKER,
        nodes: Nodes | None = None,
    ) -> ReplaySession:
        """Start a job of ``ranks`` processes of ``worker_module`` and send it ``request``.

        ``device`` is cpu or cuda; of several ``nodes`` each has an equal part of the ranks. Raises
        the error that the worker met, or EngineError.
        """
        worker = WorkerJob.start(device, ranks, worker_module, nodes)
        try:
            worker.send(request)
            reply = worker.receive(start_timeout_s)
            info = SessionInfo.model_validate(worker.with_nodes(reply["info"]))
        except BaseException:
            worker.stop()
            raise
        return cls(worker, info, silence_timeout_s)

    def run(self, experiment: Experiment) -> Outcome:
        """The outcome of one experiment."""
        (outcome,) = self.run_many([experiment])
        return outcome

    def run_many(
        self,
        experiments: Sequence[Experiment],
        progress: Callable[[float], None] = lambda _share: None,
    ) -> Iterator[Outcome]:
        """Outcomes in the order of ``experiments``, each as soon as it is known.

        Experiments that change only the loss share one forward pass. An experiment that cannot
        be replayed raises its error here; the session stays usable.
        """
        yield from self._outcomes(experiments, progress, {})

    def run_beside(
        self,
        experiment: Experiment,
        others: Sequence[Experiment],
        progress: Callable[[float], None] = lambda _share: None,
    ) -> Iterator[Outcome]:
        """As ``run_many(others)``, but their cosines are to the gradient of ``experiment``.

        ``experiment`` is replayed first, with the stored old log-probabilities.
        """
        beside = {"beside": experiment.model_dump(mode="json")}
        yield from self._outcomes(others, progress, beside)

    def _outcomes(
        self,
        experiments: Sequence[Experiment],
        progress: Callable[[float], None],
        more: dict[str, Any],
    ) -> Iterator[Outcome]:
        self._take_turn()
        answered = False
        asked = [e.model_dump(mode="json") for e in experiments]
        try:
            self._worker.send({"op": "run", "experiments": asked, **more})
            while not answered:
                reply = self._worker.receive(self._silence)
                if reply["event"] == "progress":
                    progress(float(reply["share"]))
                elif reply["event"] == "outcome":
                    yield Outcome.model_validate(reply["outcome"])
                else:
                    answered = True
        except GeneratorExit:
            # The caller took only some outcomes: the rest must not be read as the next answer.
            while not answered:
                answered = self._worker.receive(self._silence)["event"] == "done"
            raise
        finally:
            self._busy = False

    def _take_turn(self) -> None:
        if self._busy:
            raise EngineError(
                "another run of this session is unfinished: take all its outcomes, or close it, "
                "before the next request"
            )
        self._busy = True

    def save_gradients(self, experiment: Experiment, path: Path) -> None:
        """Replay ``experiment`` and write its gradient to ``path`` (a dict of float32 tensors)."""
        self._take_turn()
        self._busy = False  # one question, one answer
        self._worker.send(
            {
                "op": "gradients",
                "experiment": experiment.model_dump(mode="json"),
                "path": str(path.resolve()),
            }
        )
        self._worker.receive(self._silence)

    def bare_seconds(self, passes: int) -> list[float]:
        """Seconds of bare forward and backward passes, without loss or patches."""
        seconds = self._measure({"op": "bare", "passes": passes})["seconds"]
        return [float(s) for s in seconds]

    def peak_memory(self) -> list[int]:
        """The most memory that each rank has held so far, in bytes, in rank order.

        On a GPU what PyTorch had given to tensors, on a CPU the process's resident set.
        """
        return [int(b) for b in self._measure({"op": "memory"})["peak_bytes"]]

    def route_signals(self, directory: Path) -> tuple[LayerRoutes, ...]:
        """How the saved routes agree with the model's own, and log-probabilities under both.

        Two forward passes and no backward: nothing of the session changes. One layer after the
        other, none where the run did not replay routes. ``directory`` gets a file a recorded
        data-parallel rank (see ``engine/route_signals.py``). UsageError on several ranks.
        """
        ranks = math.prod(self.info.layout.values())
        if ranks > 1:
            found, then = f"a session on {ranks} ranks", "Any recorded layout folds onto one."
            raise UsageError(fault("route signals", "layout", found, "one rank", then))
        request = {"op": "routes", "directory": str(directory.resolve())}
        told = self._measure(request)["layers"]
        return tuple(LayerRoutes.model_validate(layer) for layer in told)

    def _measure(self, request: dict[str, Any]) -> dict[str, Any]:
        self._take_turn()
        self._busy = False  # one question, one answer
        self._worker.send(request)
        measured = self._worker.receive(self._silence)
        self._worker.receive(self._silence)
        return measured

    def close(self) -> None:
        """End the worker; safe to call twice."""
        self._worker.stop()

    def __enter__(self) -> ReplaySession:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()
