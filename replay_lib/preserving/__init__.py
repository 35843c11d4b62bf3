"""Preserve snapshots out of a rotation's reach, look whether they still are what they were, and
release them when their task is finished."""

from __future__ import annotations

from replay_lib.preserving.hashing import verify
from replay_lib.preserving.keeping import Preserved, preserve

__all__ = ["Preserved", "preserve", "verify"]
