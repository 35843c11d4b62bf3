"""What an earlier run of the same search has replayed already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replay_lib.engine.protocol import Experiment
from replay_lib.noise import device_kind, noise_of
from replay_lib.record.result import Result
from replay_lib.rule import relative_difference


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What has to be the same for a result to count again.

    ``case_digest`` is that of the case's files, ``device`` cpu or cuda, ``versions`` those of the
    packages that decide a figure's last digits; ``dp_ranks`` None: all of them; ``layout`` None:
    whichever was chosen.
    """

    case: str
    case_digest: str
    trainer: str
    backend: str
    dtype: str
    device: str
    versions: dict[str, str]
    dp_ranks: tuple[int, ...] | None = None
    layout: dict[str, int] | None = None


def earlier(results: Iterable[Result], setting: Setting, against: str) -> dict[str, Result]:
    """Results by experiment that were got in ``setting`` and compared with ``against``.

    Of several the last one. Nothing counts without the baseline beside which it was replayed: the
    gradient of that tells, once a session is open, whether the others still belong here.
    """
    known: dict[str, Result] = {}
    for result in results:
        wanted = "baseline" if result.is_baseline else against
        if result.against == wanted and _same(result, setting):
            if result.is_baseline and _elsewhere(known.get(result.experiment), result):
                known = {}  # what lies before was replayed beside another baseline
            known[result.experiment] = result
    return known if Experiment.baseline().name in known else {}


def same_step(before: Result, now: Result) -> bool:
    """Whether two baselines are one: bit-equal, or within noise where replays do not repeat."""
    if before.deterministic and now.deterministic:
        return before.digest == now.digest
    off = relative_difference(now.grad_norm_preclip, before.grad_norm_preclip)
    spread = max(before.repeat_spread or 0.0, now.repeat_spread or 0.0)
    return off is not None and off <= max(spread, noise_of(now.dtype, now.device).relative)


def _elsewhere(before: Result | None, now: Result) -> bool:
    return before is not None and not same_step(before, now)


def _same(result: Result, setting: Setting) -> bool:
    ranks = result.dp_ranks if result.fidelity == "reduced" else None
    there = {
        "case": result.case,
        "case_digest": result.case_digest,
        "trainer": result.trainer,
        "backend": result.backend,
        "dtype": result.dtype,
        "device": device_kind(result.device),
        "versions": {name: result.versions.get(name, "") for name in setting.versions},
    }
    wanted = {name: getattr(setting, name) for name in there}
    layout = setting.layout is None or result.layout == setting.layout
    return there == wanted and ranks == setting.dp_ranks and layout
