"""An engine without a model: norms by the experiment's name, and a log of what is opened and asked.

For tests of what is above the engine. ``install`` puts it in the place of the built-in one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replay_lib import methods, run
from replay_lib.engine.layout import AUTO, Layout
from replay_lib.engine.protocol import Experiment, Outcome, Retained, SessionInfo
from replay_lib.errors import BatchError
from replay_lib.patch import Seam

RECORDED = 8.441921403762574  # of the embedded case, median 2.1059
LOG = "FAKE_ENGINE_LOG"
#: Anything that is not named here takes the norm to 1.2 x the median.
NORMS = {"baseline": RECORDED, "disable-routing-replay": 8.0, "balance-negative-advantages": 5.0}
#: Smallest share of the signal that a method keeps, where it is not 0.9.
RETAINED: dict[str, float] = {}
#: To the unpatched gradient, of everything on any step.
COSINE = 0.98
REFUSED = "replay-r3-on-loss-tokens-only"
#: On a quiet control, which is known by its directory's name; anything else leaves its norm.
QUIET_NORMS = {"baseline": 2.0, "disable-routing-replay": 2.1, "balance-negative-advantages": 0.5}


def quiet_snapshot(directory: Path, snapshot: Path, norm: float = QUIET_NORMS["baseline"]) -> Path:
    """The same files as ``snapshot``'s, as those of a step whose norm was ``norm``."""
    directory.mkdir(parents=True)
    for file in snapshot.iterdir():
        (directory / file.name).symlink_to(file)
    metadata = directory / "axrl_metadata.json"
    stated = json.loads(metadata.read_text()) | {"grad_norm": norm}
    metadata.unlink()  # the link
    metadata.write_text(json.dumps(stated))
    return directory


class FakeEngine:
    """See :class:`replay_lib.engine.protocol.Engine`."""

    def __init__(self, snapshot: Path, options: run.ReplayOptions) -> None:
        self.snapshot = snapshot
        self.baselines = 0
        self.closed = False
        self.info = SessionInfo(
            snapshot=str(snapshot),
            step=85,
            fidelity="reduced" if options.dp_ranks else "folded",
            dp_ranks=options.dp_ranks or (0, 1),
            dp_recorded=2,
            layout=Layout.parse(options.layout).sizes if options.layout != AUTO else {"dp": 1},
            device="cpu" if options.device == "auto" else options.device,
            dtype="float32" if options.precision == "recorded" else options.precision,
            deterministic=options.deterministic,
            parameters=10,
            versions={"torch": "none"},
            seconds={"imports": 0.0},
            trainer=options.trainer or "grpo",
            backend=options.backend,
        )
        _log(f"open {snapshot}")

    def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
        """Outcomes by name; one method is refused, as a batch without a column would do."""
        if any(REFUSED in e.name for e in experiments) and "refuse" in os.environ.get(LOG, ""):
            raise BatchError("batch of dp rank 0: column 'loss_mask' is absent")
        _log(f"ask {' '.join(e.name for e in experiments)}")
        quiet = "quiet" in self.snapshot.name
        for experiment in experiments:
            _log(f"run {experiment.name}")
            yield outcome(experiment, quiet=quiet)

    def close(self) -> None:
        """Log the end."""
        if not self.closed:
            _log(f"close {self.snapshot}")
        self.closed = True


def outcome(experiment: Experiment, quiet: bool = False) -> Outcome:
    """What the fake gives for ``experiment``."""
    norm = NORMS.get(experiment.name, 2.5)
    if quiet:
        norm = QUIET_NORMS.get(experiment.name, QUIET_NORMS["baseline"])
    patched, kept = bool(experiment.mitigations), RETAINED.get(experiment.name, 0.9)
    return Outcome(
        experiment=experiment,
        grad_norm_preclip=norm,
        digest=f"digest of {norm}",
        loss=0.5,
        denominator=10.0,
        param_norms={"w": norm},
        touched={Seam.SETTINGS: 1} if patched else {},
        retained=Retained(tokens=1.0, advantage=1.0, dloss_dlogprob=kept) if patched else None,
        cosine=COSINE if patched else None,
        seconds=0.01,
    )


def only_recorded_methods(directory: Path) -> None:
    """Register the five recorded methods alone in this process, so that tests can count them."""
    directory.mkdir(exist_ok=True)
    for slug in run.RECORDED_METHODS:
        name = slug.replace("-", "_") + ".py"
        with contextlib.suppress(FileExistsError):  # another process of the same run was faster
            (directory / name).symlink_to(methods.builtin_dir() / name)
    methods.builtin_dir = lambda: directory


def install() -> None:
    """Replace the engine in this process."""
    run.open_engine = FakeEngine


def log_openings() -> None:
    """Keep the real engine, but log what it opens."""
    real = run.open_engine

    def opening(snapshot: Path, options: run.ReplayOptions) -> Any:
        _log(f"open {snapshot}")
        return real(snapshot, options)

    run.open_engine = opening


def _log(line: str) -> None:
    path = os.environ.get(LOG)
    if path:
        with Path(path).open("a") as log:
            log.write(f"{os.getpid()} {line}\n")
