"""From a job's name to its snapshots, without reading a tensor."""

from __future__ import annotations

from replay_lib.finding.looking import Found, find
from replay_lib.finding.places import Place, locate, locate_path
from replay_lib.finding.rows import Row, rows_of

__all__ = ["Found", "Place", "Row", "find", "locate", "locate_path", "rows_of"]
