"""Which pairs are worth a replay, and in which order. Pure functions of single results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from replay_lib.engine.protocol import Experiment, MitigationCall, is_loss_only
from replay_lib.patch import Mitigation, Seam
from replay_lib.record.result import Result
from replay_lib.sweep.figures import reduction_of, why_not
from replay_lib.sweep.writes import writes_of


@dataclass(frozen=True, kw_only=True)
class Half:
    """A single method that helped: what its replay cost and gave, and what it overwrites.

    ``seconds`` is that of its own replay, ``digest`` that of its gradient, ``writes`` are settings
    and model fields by seam.
    """

    call: MitigationCall
    seconds: float
    loss_only: bool
    reduction: float
    digest: str = ""
    diagnostic: bool = False
    writes: frozenset[tuple[Seam, str]] = frozenset()


@dataclass(frozen=True)
class Pair:
    """Two halves, in the order in which they are applied."""

    first: Half
    second: Half

    @property
    def experiment(self) -> Experiment:
        """Both at once."""
        return Experiment(mitigations=(self.first.call, self.second.call))

    @property
    def cost(self) -> tuple[bool, float]:
        """Whether it needs a forward of its own, and the seconds that it should take.

        Pairs that change only the loss share a forward: each costs one backward, as a half does.
        Any other costs what the half with the forward costs, the dearer one of two.
        """
        halves = (self.first, self.second)
        own = [half.seconds for half in halves if not half.loss_only]
        return bool(own), max(own or [half.seconds for half in halves])


@dataclass(frozen=True)
class Choice:
    """Pairs from the cheapest on, and what is not tried: a method or a pair, and the reason."""

    pairs: tuple[Pair, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


def choose_pairs(results: Iterable[Result], methods: Mapping[str, Mitigation]) -> Choice:
    """Pairs of the single methods among ``results`` that helped, in the order of their results.

    A method helped where it passes, is partial, or reduces the norm by more than noise.
    """
    halves: list[Half] = []
    skipped: list[tuple[str, str]] = []
    for result in results:
        if result.is_baseline:
            continue
        reason = _no_half(result, halves)
        if reason is None:
            halves.append(half_of(result, methods))
        else:
            skipped.append((result.experiment, reason))
    paired = pairs_of(halves)
    return Choice(paired.pairs, (*skipped, *paired.skipped))


def half_of(result: Result, methods: Mapping[str, Mitigation]) -> Half:
    """What a pair has to know of the single method of ``result``."""
    reduction = reduction_of(result)
    return Half(
        call=result.mitigations[0],
        seconds=result.seconds,
        loss_only=is_loss_only([Seam(seam) for seam in result.touched]),
        reduction=0.0 if reduction is None else reduction,
        digest=result.digest,
        diagnostic=result.diagnostic,
        writes=writes_of(result.mitigations, methods),
    )


def pairs_of(halves: Sequence[Half]) -> Choice:
    """All pairs of ``halves`` but those that cannot differ from a half, the cheapest first.

    Of pairs that cost the same the one whose halves reduce the norm more comes first.
    """
    kept: list[Pair] = []
    skipped: list[tuple[str, str]] = []
    for one, other in combinations(halves, 2):
        pair, reason = Pair(one, other), _no_pair(one, other)
        if reason is None:
            kept.append(pair)
        else:
            skipped.append((pair.experiment.name, reason))
    kept.sort(key=_order)
    return Choice(tuple(kept), tuple(skipped))


def _order(pair: Pair) -> tuple[bool, float, float, str]:
    promise = -(pair.first.reduction + pair.second.reduction)
    return (*pair.cost, promise, pair.experiment.name)


def _no_half(result: Result, halves: Sequence[Half]) -> str | None:
    reason = why_not(result)
    if reason is not None:
        return reason
    if len(result.mitigations) != 1:
        return "a combination already"
    same = next((h for h in halves if result.digest and h.digest == result.digest), None)
    if same is not None:
        return f"its gradient is bit-equal to that of {same.call.label()}, which stands for both"
    return None


def _no_pair(one: Half, other: Half) -> str | None:
    if one.call.slug == other.call.slug:
        return "one method with two sets of parameters"
    if one.diagnostic and other.diagnostic:
        return "both diagnostic"
    shared = sorted(f"{seam.value} {name}" for seam, name in one.writes & other.writes)
    if shared:
        return f"both overwrite {', '.join(shared)}"
    return None
