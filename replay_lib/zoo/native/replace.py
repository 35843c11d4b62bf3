"""What the zoo made on one rank, replaced by the same steps recorded on a layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from replay_lib.snapshot.model import Parallel
from replay_lib.writing import replace_file
from replay_lib.zoo.kinds import REPORT
from replay_lib.zoo.native.launch import LayoutStep, record_steps
from replay_lib.zoo.native.parallel import shown


def rerecord(
    reports: Sequence[dict[str, Any]],
    directories: Sequence[Path],
    parallel: Parallel,
    *,
    device: str,
    tell: Callable[[str], None],
) -> None:
    """Record every snapshot of ``reports`` again and put it in the old one's place.

    ``reports`` are changed: ``norm`` and ``ratio`` are what the layout gave, ``layout`` names it,
    and ``one_rank_norm`` is what stood there before. Their files are written anew.
    """
    made = [
        (report, directory, key)
        for report, directory in zip(reports, directories, strict=True)
        for key in ("snapshot", "quiet")
        if report[key] is not None
    ]
    steps = [LayoutStep(d / r[key], d / ".recorded" / r[key], parallel) for r, d, key in made]
    recorded = record_steps(steps, device=device, tell=tell)
    for (report, _, key), place, step in zip(made, steps, recorded, strict=True):
        shutil.rmtree(place.source)
        place.target.rename(place.source)
        if key == "snapshot":
            median = report["median"]
            report["layout"], report["one_rank_norm"] = shown(parallel), report["norm"]
            report["norm"] = step["norm"]
            report["ratio"] = step["norm"] / median if median else None
    for report, directory in zip(reports, directories, strict=True):
        shutil.rmtree(directory / ".recorded", ignore_errors=True)
        replace_file(directory / REPORT, (json.dumps(report, indent=1) + "\n").encode())
