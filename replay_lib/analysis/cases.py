"""A case under the doctor: its snapshots, and whether its files are those that were sealed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from replay_lib.analysis.doctor import Examined, examine, in_order
from replay_lib.analysis.findings import Finding, finding, from_error
from replay_lib.case import Case
from replay_lib.digests import broken_seals
from replay_lib.errors import SpikeReplayError

QUIET = "quiet"


#: A quiet control is an ordinary step: its norm is below the detector's threshold.
_OF_A_SPIKE = "norm-below-detector"


def examine_case(path: str | Path) -> Examined:
    """The snapshot or case at ``path``; of a case, its quiet control and its seals too.

    What is found in the quiet control names its files with ``quiet/``. Raises CaseError where its
    ``case.yaml`` is malformed, else as :func:`examine` does.
    """
    case = Case.open(path)
    examined = examine(case.snapshot)
    found, read = [*examined.findings, *check_seals(case)], dict(examined.read)
    if case.sha256:
        read["sealed_files"] = len(case.sha256)
    if case.quiet is not None:
        told, files = _quiet_control(case.quiet)
        found += told
        read["quiet_files"] = files
    return dataclasses.replace(examined, findings=in_order(found), read=read)


def _quiet_control(path: Path) -> tuple[list[Finding], int]:
    """What is found in the snapshot of an ordinary step, and how many files it has."""
    found: list[Finding] = []
    files = 0
    try:
        examined = examine(path)
    except SpikeReplayError as error:
        found.append(from_error(error, path.name))
    else:
        found += [one for one in examined.findings if one.code != _OF_A_SPIKE]
        files = examined.read.get("files", 0)
    return [dataclasses.replace(one, file=f"{QUIET}/{one.file}") for one in found], files


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
