"""An experiment that a case could not take."""

from __future__ import annotations

from dataclasses import dataclass

from replay_lib.errors import SpikeReplayError


@dataclass(frozen=True)
class Refusal:
    """An experiment that could not be replayed on this case, and why."""

    case: str
    experiment: str
    error: SpikeReplayError
