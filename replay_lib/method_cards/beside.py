"""A method beside those that are recorded already, replayed in one session.

Results carry a gradient's cosine to the baseline's alone; whether two methods do the same is seen
by the cosine of their own gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from replay_lib.engine.protocol import Engine, Experiment, MitigationCall, Outcome
from replay_lib.errors import PatchError, SpikeReplayError
from replay_lib.methods import find
from replay_lib.noise import noise_of
from replay_lib.patch import Mitigation
from replay_lib.quiet import REFUSALS
from replay_lib.record.cards import Card
from replay_lib.record.result import Result
from replay_lib.rule import relative_difference

#: Beyond it two gradients are less than 2.6 degrees apart: one method under two names.
SAME_COSINE = 0.999


@runtime_checkable
class Compares(Protocol):
    """An engine that takes cosines to another experiment's gradient than the baseline's."""

    def run_beside(self, experiment: Experiment, others: Sequence[Experiment]) -> Iterator[Outcome]:
        """See :meth:`replay_lib.engine.session.ReplaySession.run_beside`."""
        ...


@dataclass(frozen=True)
class Beside:
    """Cosines of a method's gradient to those of recorded methods by slug; None: no angle exists.

    ``untold`` says of the others why they could not be compared.
    """

    cosines: Mapping[str, float | None]
    untold: Mapping[str, str]

    @property
    def same(self) -> list[str]:
        """Recorded methods whose gradient is the same but for a factor."""
        return [
            s for s, cosine in self.cosines.items() if cosine is not None and cosine > SAME_COSINE
        ]


def recorded_at(
    seams: Sequence[str], cards: Mapping[str, Card], methods: Mapping[str, Mitigation]
) -> tuple[dict[str, Experiment], dict[str, str]]:
    """Experiments of the methods with a card that act at exactly ``seams``, by slug.

    Whatever the card says they are worth: who finds one of them again adds to its card. Second:
    those that cannot be built here, and why.
    """
    found, untold = {}, {}
    for slug, card in cards.items():
        try:
            call = _call_of(card)
            method = find(call.slug, methods)
            if set(map(str, method.seams)) != set(seams):
                continue
            if set(method.needs) - set(call.params):
                untold[slug] = f"it needs {', '.join(method.needs)}"
                continue
            method.patches(call.params)
        except SpikeReplayError as error:
            untold[slug] = str(error)
            continue
        found[slug] = Experiment(mitigations=(call,))
    return found, untold


def _call_of(card: Card) -> MitigationCall:
    told = card.declared
    if told is None:
        return MitigationCall(slug=card.slug)
    return MitigationCall(slug=told.method, params=told.parameters)


def compare(
    engine: Engine, experiment: Experiment, others: Mapping[str, Experiment], told: Result
) -> Beside:
    """Replay ``experiment`` and ``others`` in the session of ``engine``.

    PatchError where the method does not do any more what the result ``told`` says it did.
    """
    assert isinstance(engine, Compares), "only the native engine takes such cosines"
    itself = next(engine.run_beside(experiment, [experiment]), None)
    assert itself is not None, "one experiment, one outcome"
    _check_as_told(itself, told, engine)
    cosines: dict[str, float | None] = {}
    untold: dict[str, str] = {}
    try:
        outcomes = list(engine.run_beside(experiment, list(others.values()))) if others else []
        cosines = {s: one.cosine for s, one in zip(others, outcomes, strict=True)}
    except REFUSALS:  # one of them: the rest one by one
        for slug, other in others.items():
            try:
                (outcome,) = engine.run_beside(experiment, [other])
                cosines[slug] = outcome.cosine
            except REFUSALS as error:
                untold[slug] = str(error)
    return Beside(cosines, untold)


def _check_as_told(now: Outcome, told: Result, engine: Engine) -> None:
    info = engine.info
    noise = (noise_of(info.dtype, info.device), noise_of(told.dtype, told.device))
    band = max(told.noise_band or 0.0, *(one.relative for one in noise))
    off = relative_difference(now.grad_norm_preclip, told.grad_norm_preclip)
    if off is not None and off <= band:
        return
    raise PatchError(
        f"{told.experiment}: its norm is {now.grad_norm_preclip:.7g} now, found "
        f"{told.grad_norm_preclip:.7g} in the ledger, expected them within {band:.2g} relative: "
        "method or snapshot changed since. Replay it again, then record that"
    )
