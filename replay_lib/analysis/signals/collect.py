"""Read a snapshot rank by rank, each rank once: columns first, then its routes.

At no time is more than one rank in memory, and of that one either columns or routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from replay_lib.analysis.signals.advantages import AdvantageStage
from replay_lib.analysis.signals.improbable import ImprobableStage
from replay_lib.analysis.signals.lengths import LengthStage
from replay_lib.analysis.signals.outliers import Decode, OutlierStage
from replay_lib.analysis.signals.ratios import RatioStage
from replay_lib.analysis.signals.rewards import RewardStage
from replay_lib.analysis.signals.routing import RoutingStage, router_of
from replay_lib.analysis.signals.values import ValueStage
from replay_lib.analysis.signals.view import View, view_of
from replay_lib.errors import SpikeReplayError
from replay_lib.snapshot.batches import load_columns, load_payload
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.run_config import load_model_fields

Tell = Callable[[int, int], None]  # ranks read, of how many

#: Known from disk: numerator, denominator, and which of them the tokens were drawn from. The
#: reference policy drew none, so its divergence is estimated from the trainer's.
PAIRS = (("old", "rollout", "rollout"), ("old", "ref", "old"))


@dataclass
class Collected:
    """All stages; ``tokens`` are real ones of rows that are no padding."""

    routing: RoutingStage
    ratios: dict[str, RatioStage]
    outliers: dict[str, OutlierStage]
    advantages: AdvantageStage = field(default_factory=AdvantageStage)
    lengths: LengthStage = field(default_factory=LengthStage)
    rewards: RewardStage = field(default_factory=RewardStage)
    values: ValueStage = field(default_factory=ValueStage)
    improbable: ImprobableStage = field(default_factory=ImprobableStage)
    tokens: int = 0
    loss_tokens: int = 0
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def collect(
    snapshot: Snapshot, decode: Decode | None = None, tell: Tell = lambda _done, _of: None
) -> Collected:
    """Every stage over every rank. Errors as of reading a batch."""
    found = Collected(routing=_routing(snapshot), ratios={}, outliers={})
    found.outliers["advantage"] = OutlierStage("advantage", decode)
    for numerator, denominator, sampled in PAIRS:
        stage = RatioStage(numerator, denominator, sampled)
        name = f"{numerator}/{denominator}"
        found.ratios[name], found.outliers[name] = stage, OutlierStage(name, decode)
    for dp_rank in range(snapshot.parallel.dp):
        tell(dp_rank, snapshot.parallel.dp)
        _one_rank(snapshot, dp_rank, found)
    tell(snapshot.parallel.dp, snapshot.parallel.dp)
    return found


def _routing(snapshot: Snapshot) -> RoutingStage:
    try:
        fields = load_model_fields(snapshot)
    except SpikeReplayError:  # the doctor tells what is wrong with it; the ids speak for themselves
        return RoutingStage(experts=None)
    experts, moe = router_of(fields)
    return RoutingStage(experts=experts, moe=moe)


def _one_rank(snapshot: Snapshot, dp_rank: int, found: Collected) -> None:
    batch, paths = load_columns(snapshot, dp_rank)
    view = view_of(batch)
    found.tokens += int(batch.attention_mask[view.real_B].sum())
    found.loss_tokens += int(view.loss_BT.sum())
    for stage in (
        found.advantages,
        found.lengths,
        found.rewards,
        found.values,
        found.improbable,
    ):
        stage.add(view)
    advantage = view.on_loss("advantage")
    assert advantage is not None
    found.outliers["advantage"].add(view, advantage, one_a_row=True)
    for name, ratio in found.ratios.items():
        _ratio(view, ratio, found.outliers[name], found)
    used = found.routing.rows(view, paths)
    del batch, view, advantage
    found.routing.payload(load_payload(snapshot, dp_rank, paths), used)


def _ratio(view: View, stage: RatioStage, outliers: OutlierStage, found: Collected) -> None:
    names = [f"{stage.numerator}_logprobs", f"{stage.denominator}_logprobs"]
    absent = [name for name in names if getattr(view.batch, name) is None]
    if absent:
        why = f"no column {', '.join(absent)}"
        found.absent[f"ratio {stage.numerator}/{stage.denominator}"] = why
        return
    first, second = (view.on_loss(name) for name in names)
    assert first is not None and second is not None
    stage.add(view, first, second)
    outliers.add(view, first.double() - second.double())
