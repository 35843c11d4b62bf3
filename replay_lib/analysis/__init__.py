"""Why: what a snapshot holds that can make a step spike or a replay go wrong. No model is built."""

from __future__ import annotations

from replay_lib.analysis.cases import check_seals, examine_case
from replay_lib.analysis.doctor import Examined, examine
from replay_lib.analysis.environment import describe_environment
from replay_lib.analysis.findings import CODES, Finding, Severity

__all__ = [
    "CODES",
    "Examined",
    "Finding",
    "Severity",
    "check_seals",
    "describe_environment",
    "examine",
    "examine_case",
]
