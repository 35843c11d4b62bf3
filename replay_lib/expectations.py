"""Whether the expectations of a case can be met: every method that it names exists."""

from __future__ import annotations

from collections.abc import Mapping

from replay_lib.case import Case
from replay_lib.errors import PatchError
from replay_lib.patch import Mitigation
from replay_lib.run import parse_experiments


def check_expected(case: Case, methods: Mapping[str, Mitigation]) -> None:
    """PatchError that names the file where ``case`` expects something of an unknown method."""
    try:
        parse_experiments(case.expected, "baseline", methods)
    except PatchError as error:
        raise PatchError(f"{case.file or case.name}: expected: {error}") from error


def unknown_expected(case: Case, methods: Mapping[str, Mitigation]) -> dict[str, str]:
    """By what ``case`` expects something of: why there is no such method, for those without one."""
    faults: dict[str, str] = {}
    for label in case.expected:
        try:
            parse_experiments([label], "baseline", methods)
        except PatchError as error:
            faults[label] = f"{case.file or case.name}: expected: {error}"
    return faults
