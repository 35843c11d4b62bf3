"""The parent's side of ``--backend axrl``: what it cannot honour, what is missing, then the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from replay_lib.backend.missing import missing_for_backend
from replay_lib.engine.early import refuse_imported
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import EngineError, UsageError
from replay_lib.snapshot.opening import open_snapshot

WORKER = "replay_lib.backend.worker"
DEVICE = "cuda"
#: AXRL starts ray, reads a tokenizer and builds the model and its optimizer before it answers.
START_TIMEOUT_S = 3600.0


def open_axrl(
    snapshot: Path, *, device: str = "auto", mitigations: Sequence[Path | str] = ()
) -> ReplaySession:
    """A session whose replays are AXRL's own, as many ranks as the run had.

    Raises EngineError with all that is missing here, before anything is started, and UsageError
    for the device cpu and for a portable snapshot.
    """
    refuse_imported(snapshot)
    lacking = missing_for_backend(snapshot)
    if lacking:
        lines = "".join(f"\n  - {line}" for line in lacking)
        raise EngineError(f"backend axrl cannot run here; missing:{lines}")
    if device == "cpu":
        raise UsageError("backend axrl: it cannot honour --device cpu: AXRL runs on NVIDIA devices")
    opened = open_snapshot(snapshot)
    if opened.portable:
        raise UsageError(
            f"backend axrl: {opened.path} is a portable snapshot, which Megatron cannot read; turn "
            "it back with spike-replay import first"
        )
    request = {
        "op": "open",
        "snapshot": str(Path(snapshot).resolve()),
        "mitigations": [str(Path(m).resolve()) for m in mitigations],
        "python_path": [p or str(Path.cwd()) for p in sys.path],
    }
    return ReplaySession.start(
        request,
        device=DEVICE,
        ranks=opened.parallel.world_size,
        start_timeout_s=START_TIMEOUT_S,
        worker_module=WORKER,
    )
