"""What the model says of its saved routes and log-probabilities; needs a replay session."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from replay_lib import layout
from replay_lib.analysis.signals.figures import Ratio
from replay_lib.analysis.signals.ratios import RatioStage
from replay_lib.analysis.signals.session_summary import (
    Agreement,
    LayerAgreement,
    Mismatch,
    SessionSignals,
)
from replay_lib.analysis.signals.signs import ROUTE_DISAGREEMENT, sign
from replay_lib.analysis.signals.stream import Stream
from replay_lib.analysis.signals.summary import Sign
from replay_lib.analysis.signals.view import View, view_of
from replay_lib.engine.layout import ONE_RANK
from replay_lib.engine.protocol import LayerRoutes, RouteCounts
from replay_lib.engine.session import ReplaySession
from replay_lib.snapshot.batches import load_columns
from replay_lib.snapshot.model import Snapshot

LOSS, OTHER = "loss", "non-loss"


def session_signals(snapshot: Snapshot, *, device: str = "auto") -> SessionSignals:
    """Open a session on one rank, run its model forward, and compare. Errors of a session."""
    with (
        tempfile.TemporaryDirectory(prefix="spike-replay-") as home,
        ReplaySession.open(snapshot.path, device=device, layout=ONE_RANK) as session,
    ):
        layers = session.route_signals(Path(home))
        info = session.info
        ratios, mismatches = compare(snapshot, Path(home))
    return SessionSignals(
        fidelity=info.fidelity,
        device=info.device,
        dtype=info.dtype,
        ratios=ratios,
        layers=tuple(agreement(layer) for layer in layers),
        mismatches=mismatches,
    )


def agreement(layer: LayerRoutes) -> LayerAgreement:
    """Shares from counts; None where there is no token or no number."""
    return LayerAgreement(
        layer=layer.layer,
        every=_shares(layer.prompt.plus(layer.response), layer.topk),
        prompt=_shares(layer.prompt, layer.topk),
        response=_shares(layer.response, layer.topk),
    )


def _shares(counts: RouteCounts, topk: int) -> Agreement:
    tokens = counts.tokens

    def share(count: float, of: int) -> float | None:
        return count / of if of and math.isfinite(count) else None

    largest = counts.gap_max
    return Agreement(
        tokens=tokens,
        ordered=share(counts.ordered, tokens),
        overlap=share(counts.slots_in_set, tokens * topk),
        disjoint=share(counts.disjoint, tokens),
        logit_gap=share(counts.gap_sum, tokens),
        largest_gap=largest if largest is not None and math.isfinite(largest) else None,
    )


@dataclass
class MismatchStage:
    """Sums over pairs of log-probabilities that are both numbers."""

    first: str
    second: str
    tokens: str
    apart: Stream = field(default_factory=Stream)
    size: Stream = field(default_factory=Stream)
    halves: Stream = field(default_factory=Stream)

    def add(self, first_N: Tensor, second_N: Tensor) -> None:
        """Take in one rank's tokens."""
        gap_N = first_N.double() - second_N.double()
        finite = gap_N.isfinite()
        self.apart.moments(gap_N[finite].abs())
        self.size.moments(second_N.double()[finite].abs())
        self.halves.moments(gap_N[finite].square() / 2)

    def result(self) -> Mismatch:
        """All ranks."""
        known = self.apart.count > 0
        usable = known and self.size.mean > 0
        return Mismatch(
            first=self.first,
            second=self.second,
            tokens=self.tokens,
            count=self.apart.count,
            mean_absolute=self.apart.mean if known else None,
            largest=self.apart.maximum if known else None,
            normalised=self.apart.mean / self.size.mean if usable else None,
            k2=self.halves.mean if known else None,
        )


#: What is compared: first, second, on which tokens.
_MISMATCHES = (
    ("replayed", "own", LOSS),
    ("replayed", "own", OTHER),
    ("replayed", "rollout", LOSS),
    ("own", "rollout", LOSS),
    ("replayed", "old", LOSS),
)


def compare(snapshot: Snapshot, directory: Path) -> tuple[tuple[Ratio, ...], tuple[Mismatch, ...]]:
    """Ratios of the current policy, and mismatches, of log-probabilities in ``directory``.

    Current is what the run computed: with the routes forced, where it forced them.
    """
    pairs = [RatioStage("current", "old", "old"), RatioStage("current", "rollout", "rollout")]
    stages = [MismatchStage(*names) for names in _MISMATCHES]
    for view, found in _ranks(snapshot, directory):
        current = found.get("replayed", found["own"])
        for pair in pairs:
            stored = view.on_loss(f"{pair.denominator}_logprobs")
            if stored is not None:
                pair.add(view, current[view.loss_BT], stored)
        for stage in stages:
            mask_BT = view.loss_BT if stage.tokens == LOSS else found["other"]
            first, second = (_column(view, found, name) for name in (stage.first, stage.second))
            if first is not None and second is not None:
                stage.add(first[mask_BT], second[mask_BT])
    told = tuple(pair.result() for pair in pairs if pair.known)
    return told, tuple(stage.result() for stage in stages if stage.apart.count)


def _ranks(snapshot: Snapshot, directory: Path) -> Iterator[tuple[View, dict[str, Tensor]]]:
    from safetensors.torch import load_file

    for dp_rank in range(snapshot.parallel.dp):
        batch, _ = load_columns(snapshot, dp_rank)
        yield view_of(batch), load_file(directory / layout.route_signals_file(dp_rank))


def _column(view: View, found: dict[str, Tensor], name: str) -> Tensor | None:
    stored: Tensor | None = getattr(view.batch, f"{name}_logprobs", None)
    return found.get(name, stored)


def route_disagreement(signals: SessionSignals) -> Sign:
    """The lowest overlap of a layer, in prompts or responses."""
    found = [
        (
            part.overlap,
            f"MoE layer {layer.layer}, {name} tokens: the same order in {part.ordered:.2%}",
        )
        for layer in signals.layers
        for name, part in (("prompt", layer.prompt), ("response", layer.response))
        if part.overlap is not None
    ]
    lowest = min(
        found, default=(None, "the run did not replay routes"), key=lambda one: one[0] or 0.0
    )
    return sign(
        ROUTE_DISAGREEMENT,
        lowest[0],
        unit="of saved slots are in the model's own top-k, in the layer where fewest are",
        bound=0.9,
        below=True,
        reason="published routes that were right overlapped by 98%; a tenth of the slots is no "
        "rounding",
        found=lowest[1],
    )
