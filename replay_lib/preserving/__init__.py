"""Preserve snapshots out of a rotation's reach, look whether they still are what they were, and
release them when their task is finished."""

from __future__ import annotations

from replay_lib.preserving.hashing import verify
from replay_lib.preserving.keeping import Preserved, preserve
from replay_lib.preserving.releasing import Released, release

__all__ = ["Preserved", "Released", "preserve", "release", "verify"]
