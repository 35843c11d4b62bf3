"""All ranks go on with an experiment, or all give it up: what one of them says holds for the job.

A patch runs on every rank. One that fails on a rank alone would leave the others waiting for it in
the next exchange, and one that gives another result there (drawn from the process's own random
state, say) would give a wrong figure without a word: ranks that share a batch, a parameter or the
settings are to have the same of it. So ranks report what they patched, as fingerprints, and what
they met, before the exchange that would go wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS
from replay_lib.engine.apply import LIVE_FIELDS, Patched
from replay_lib.engine.comm import Comm
from replay_lib.engine.gradients import fingerprint
from replay_lib.engine.model import LiveModel
from replay_lib.engine.weights import Slice
from replay_lib.errors import PatchError, SpikeReplayError, fault
from replay_lib.patch import Patch, Seam

#: What was patched: its seam (empty: the patches themselves), its name, and what tells it from
#: others of that name.
Place = tuple[str, str, str]

PURE = (
    "Make it pure: the same on every rank. Draw from a generator that the batch seeds "
    "(batch.dp_rank, batch.index), never from the process's own random state, its id, the clock "
    "or its environment"
)
SHARDS = (
    ", and of weights use each element or expert by itself, since under tp, pp and ep a rank has a "
    "part of the model"
)


class AbandonedError(Exception):
    """All ranks gave up an experiment for ``error``, at the same point: the job goes on."""

    def __init__(self, error: SpikeReplayError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Report:
    """One rank's word on one experiment; ``methods`` are the labels of its methods by seam."""

    methods: Mapping[Seam, str] = field(default_factory=dict)
    made: dict[Place, str] = field(default_factory=dict)
    error: SpikeReplayError | None = None


@contextlib.contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Put an error of ours into ``report``; :func:`agree` raises it, on every rank."""
    try:
        yield
    except SpikeReplayError as error:
        report.error = error


def agree(comm: Comm, reports: Sequence[Report]) -> None:
    """Return where no rank met an error and all made the same; all ranks call this together.

    ``reports`` are of the same experiments in the same order on every rank. On one rank the first
    error is raised as it is, on several all ranks raise the same AbandonedError: the error of the
    first experiment that has one, with the ranks that met it, or a PatchError for what differs.
    """
    if comm.world == 1:
        for report in reports:
            if report.error is not None:
                raise report.error
        return
    everybody = comm.gather([(report.made, report.error) for report in reports])
    for report, told in zip(reports, zip(*everybody, strict=True), strict=True):
        error = _met([e for _, e in told]) or _difference(report.methods, [m for m, _ in told])
        if error is not None:
            raise AbandonedError(error)


def _met(errors: Sequence[SpikeReplayError | None]) -> SpikeReplayError | None:
    """The first rank's error; where others met none, or another one, with the ranks that did."""
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return None
    ranks = [rank for rank, e in enumerate(errors) if e is not None and str(e) == str(first)]
    if len(ranks) == len(errors):
        return first
    return type(first)(f"{first} (met on {_ranks(ranks)} of {len(errors)} alone)")


def _difference(
    methods: Mapping[Seam, str], made: Sequence[Mapping[Place, str]]
) -> PatchError | None:
    """An error for the first place that is not the same on all ranks that have it."""
    for place in dict.fromkeys(place for one in made for place in one):
        having = [rank for rank, one in enumerate(made) if place in one]
        reference = made[having[0]][place]
        others = [rank for rank in having if made[rank][place] != reference]
        if others:
            seam, name, _ = place
            named = methods[Seam(seam)] if seam else " + ".join(dict.fromkeys(methods.values()))
            found = f"another {name} on {_ranks(others)} than on rank {having[0]}"
            expected = f"the same on {_ranks(having)}, which share it"
            then = PURE + (SHARDS if seam == Seam.WEIGHTS else "") + "."
            place_told = f"{seam} seam" if seam else "its patches"
            return PatchError(fault(f"mitigation {named}", place_told, found, expected, then))
    return None


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def made_of_inputs(patches: Sequence[Patch], patched: Patched) -> dict[Place, str]:
    """What the seams that act before the model made, and at which seams the patches act."""
    seams = [patch.seam for patch in patches]
    made: dict[Place, str] = {("", "list of seams", ""): str([seam.value for seam in seams])}
    if Seam.ROWS in seams:
        made[Seam.ROWS, "packing", ""] = patched.rows
    if Seam.SETTINGS in seams:
        for key, value in patched.settings.model_dump().items():
            made[Seam.SETTINGS, key, ""] = repr(value)
    for batch, forced in zip(patched.batches, patched.forced, strict=True):
        of = f"of dp rank {batch.dp_rank}"
        if Seam.ROUTING in seams and forced is not None:
            made[Seam.ROUTING, f"mask {of}", ""] = fingerprint(forced)
        for name in TOKEN_COLUMNS + ROW_COLUMNS if Seam.BATCH in seams else ():
            column = getattr(batch, name)
            made[Seam.BATCH, f"{name} {of}", ""] = "none" if column is None else fingerprint(column)
    return made


def made_of_model(model: LiveModel, pieces: Sequence[Slice], patched: Patched) -> dict[Place, str]:
    """Parameters and fields of the live model while ``patched`` acts on it."""
    made: dict[Place, str] = {}
    if patched.model:
        for name in LIVE_FIELDS:
            made[Seam.MODEL, name, ""] = repr(getattr(model.config, name))
    if patched.weights:
        places: dict[str, list[str]] = {}
        for piece in pieces:
            places.setdefault(piece.owner, []).append(str(piece.offset))
        for own, parameter in model.module.named_parameters():
            place = (Seam.WEIGHTS, model.whole_name(own), ",".join(places.get(own, ())))
            made[place] = fingerprint(parameter)
    return made
