"""A case under the doctor: its snapshot, and whether its files are those that were sealed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from replay_lib.analysis.doctor import Examined, examine, in_order
from replay_lib.analysis.findings import Finding, finding
from replay_lib.case import Case
from replay_lib.digests import broken_seals


def examine_case(path: str | Path) -> Examined:
    """The snapshot or case at ``path``; of a case, the seals of its quiet control too.

    Raises CaseError where its ``case.yaml`` is malformed, else as :func:`examine` does.
    """
    case = Case.open(path)
    examined = examine(case.snapshot)
    found = in_order((*examined.findings, *check_seals(case)))
    return (
        dataclasses.replace(
            examined, findings=found, read=examined.read | {"sealed_files": len(case.sha256)}
        )
        if case.sha256
        else examined
    )


def check_seals(case: Case) -> Iterator[Finding]:
    """A finding for each file that is not as ``case.yaml`` sealed it."""
    if case.file is None:
        return
    places = [case.snapshot, *([case.quiet] if case.quiet else [])]
    for seal in broken_seals(case.file, places, case.sha256):
        found = f"{seal.name}: sha256 {seal.found}, sealed as {seal.stated}"
        if not seal.stated:
            found = f"{seal.name}: not listed in {case.file.name}"
        yield finding("case-unsealed", seal.name, found)
