"""Several snapshots replayed one after the other in one worker: its imports are most of a start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from replay_lib.engine.protocol import Experiment, Outcome, SessionInfo
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import SpikeReplayError

BASELINE = Experiment.baseline()


class Replays:
    """A worker that opens one snapshot after another; one that is refused ends it."""

    def __init__(self) -> None:
        self.session: ReplaySession | None = None
        self.open = ""

    def baseline(self, snapshot: Path, precision: str = "recorded") -> Outcome:
        """The baseline of ``snapshot``."""
        return self.run(snapshot, BASELINE, precision)

    def run(self, snapshot: Path, experiment: Experiment, precision: str = "recorded") -> Outcome:
        """What ``experiment`` gives on ``snapshot``."""
        return self.opened(snapshot, precision).run(experiment)

    def opened(self, snapshot: Path, precision: str = "recorded") -> ReplaySession:
        """The session, with ``snapshot`` loaded."""
        wanted = f"{snapshot.resolve()} {precision}"
        if self.session is None:
            self.session = ReplaySession.open(snapshot, device="cpu", precision=precision)
        elif self.open != wanted:
            self._open_again(snapshot, precision)
        self.open = wanted
        return self.session

    def _open_again(self, snapshot: Path, precision: str) -> None:
        assert self.session is not None
        worker = self.session._worker
        request = {"op": "open", "snapshot": str(snapshot.resolve()), "precision": precision}
        try:
            worker.send(request)
            reply = worker.receive(120.0)
        except SpikeReplayError:
            self.close()
            raise
        self.session.info = SessionInfo.model_validate(reply["info"])

    def close(self) -> None:
        """End the worker; the next snapshot starts another."""
        if self.session is not None:
            self.session.close()
        self.session = None


@contextlib.contextmanager
def replays() -> Iterator[Replays]:
    """One worker for as many snapshots as the block replays."""
    many = Replays()
    try:
        yield many
    finally:
        many.close()
