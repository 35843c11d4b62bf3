"""``analyze``: a snapshot or a case to its signals."""

from __future__ import annotations

import math
import time
from pathlib import Path

from replay_lib.analysis.signals.collect import Collected, Tell, collect
from replay_lib.analysis.signals.outliers import Decode
from replay_lib.analysis.signals.parameters import grad_info
from replay_lib.analysis.signals.signs import signs_of
from replay_lib.analysis.signals.summary import Norms, Sign, Signals
from replay_lib.case import Case
from replay_lib.detect import is_spike
from replay_lib.rule import ratio_of
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot

_NO_HISTORY = "a snapshot holds the median of the earlier norms, not the norms"


def analyze(
    path: str | Path,
    *,
    decode: Decode | None = None,
    session: bool = False,
    device: str = "auto",
    tell: Tell = lambda _done, _of: None,
) -> Signals:
    """The signals of the snapshot or case at ``path``.

    Of a case with a quiet control each sign tells the control's figure too. ``decode`` makes text
    of token ids. ``session`` runs the model on ``device`` as well. Raises what opening, reading and
    a session raise, naming file and field.
    """
    started = time.monotonic()
    case = Case.open(path)
    snapshot = open_snapshot(case.snapshot)
    found = collect(snapshot, decode, tell)
    quiet = signs_of(collect(open_snapshot(case.quiet))) if case.quiet else ()
    figures = grad_info(snapshot)
    modelled = None
    if session:
        from replay_lib.analysis.signals.model import route_disagreement, session_signals

        modelled = session_signals(snapshot, device=device)
    absent = {"norm history": _NO_HISTORY} | found.absent | _absent(snapshot, found)
    if figures is None:
        absent["grad_info"] = "no rank saved per-parameter figures"
    signs = beside(signs_of(found), quiet)
    if modelled is not None:
        signs = (*signs, route_disagreement(modelled))
    return Signals(
        snapshot=str(case.snapshot),
        case=case.name if case.file else None,
        dp=snapshot.parallel.dp,
        rows=found.lengths.rows,
        tokens=found.tokens,
        loss_tokens=found.loss_tokens,
        dtypes=found.values.dtypes,
        norms=norms_of(snapshot, case.thresholds.target_ratio.value),
        signs=signs,
        advantages=found.advantages.result(),
        ratios=tuple(r.result() for r in found.ratios.values() if r.known),
        columns=found.values.result(),
        lengths=found.lengths.result(),
        rewards=found.rewards.result(),
        trajectories=found.rewards.trajectory_result(),
        routing=found.routing.result(snapshot),
        grad_info=figures,
        outliers=tuple(one for stage in found.outliers.values() for one in stage.found),
        nonfinite=tuple(found.values.bad.values()),
        session=modelled,
        absent=absent,
        notes=tuple(found.notes),
        seconds=round(time.monotonic() - started, 3),
    )


def beside(signs: tuple[Sign, ...], quiet: tuple[Sign, ...]) -> tuple[Sign, ...]:
    """``signs`` with the figures that the quiet control has for them."""
    figures = {one.name: one.figure for one in quiet}
    return tuple(one.model_copy(update={"quiet": figures.get(one.name)}) for one in signs)


def norms_of(snapshot: Snapshot, target_ratio: float) -> Norms:
    """Recorded norm, median and what they are held to; None for what is missing or no number.

    A quotient or product beyond float64 (a median of 1e-308) is no number either.
    """
    norm = _number(snapshot.grad_norm_preclip)
    median = _number(snapshot.grad_norm_median)
    usable = median is not None and median > 0
    threshold = snapshot.spike.spike_ratio * median if median is not None and usable else None
    target = target_ratio * median if median is not None and usable else None
    return Norms(
        step=snapshot.step,
        grad_norm_preclip=norm,
        median=median,
        ratio=None if norm is None else _number(ratio_of(norm, median)),
        spike_ratio=snapshot.spike.spike_ratio,
        threshold=_number(threshold),
        target_ratio=target_ratio,
        target=_number(target),
        is_spike=is_spike(norm, median, snapshot.spike.spike_ratio),
        warmup_steps=snapshot.spike.warmup_steps,
        history_window=snapshot.spike.history_window,
    )


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _absent(snapshot: Snapshot, found: Collected) -> dict[str, str]:
    """What is not told, and why."""
    told: dict[str, str] = {}
    for name, value in (
        ("norm", snapshot.grad_norm_preclip),
        ("median norm", snapshot.grad_norm_median),
    ):
        if _number(value) is None:
            told[name] = "not recorded" if value is None else f"recorded as {value}"
    if found.lengths.turns is None:
        told["turns"] = "no column turn_index"
    if found.rewards.reward is None:
        told["rewards"] = "no column reward"
    if found.rewards.trajectories is None:
        told["trajectories"] = "no column trajectory_id"
    if not found.routing.rows_with:
        told["routes"] = "no row has routes"
    if not found.loss_tokens:
        told["loss tokens"] = "no token trains: advantages, ratios and lengths are of nothing"
    return told
