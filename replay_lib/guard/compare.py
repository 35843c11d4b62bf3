"""Two results of one experiment, the reference's and the tested one, to what changed. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from replay_lib.errors import SpikeReplayError
from replay_lib.guard.gradients import DISTANCE, Difference
from replay_lib.noise import noise_of
from replay_lib.record.result import Result
from replay_lib.rule import Verdict, compare, relative_difference
from replay_lib.run import Replayed

BASELINE = "baseline"
NAMED = 3  # of things that are not finite, in one line


@dataclass(frozen=True)
class Pair:
    """One experiment of one case under both trainers; an error stands where none came out."""

    case: str
    experiment: str
    reference: Result | SpikeReplayError
    tested: Result | SpikeReplayError
    difference: Difference | None = None

    @property
    def bit_equal(self) -> bool:
        """Whether both trainers gave the same gradient, bit for bit."""
        return (
            isinstance(self.reference, Result)
            and isinstance(self.tested, Result)
            and self.reference.digest == self.tested.digest
        )


@dataclass(frozen=True)
class Change:
    """What one experiment does otherwise than under the reference, in words.

    ``worse``: what turns a build red. A verdict that fell; a step that cannot be replayed any more;
    and a baseline with another gradient: the recorded step is then not what this trainer computes.
    """

    pair: Pair
    words: tuple[str, ...]
    worse: bool

    @property
    def told(self) -> str:
        """All words in one line."""
        return "; ".join(self.words)


def pairs_of(case: str, reference: Replayed, tested: Replayed) -> list[Pair]:
    """The experiments of one case, in the reference's order, each under both trainers.

    An error of the whole case, which stands for its baseline, stands for every experiment that the
    other trainer replayed.
    """
    mine, theirs = _by_name(tested), _by_name(reference)
    names = list(dict.fromkeys([*theirs, *mine]))
    return [Pair(case, n, _found(theirs, n), _found(mine, n)) for n in names]


def _by_name(replayed: Replayed) -> dict[str, Result | SpikeReplayError]:
    found: dict[str, Result | SpikeReplayError] = {r.experiment: r for r in replayed.results}
    return found | {r.experiment: r.error for r in replayed.refused}


def _found(known: Mapping[str, Result | SpikeReplayError], name: str) -> Result | SpikeReplayError:
    found = known.get(name, known.get(BASELINE))
    assert found is not None, "a case gives its baseline or an error"
    return found


def to_measure(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """Whose gradients are worth comparing: the baseline, then what its change does not explain.

    Where the baseline's gradient changed, those of methods followed it, and the baseline alone is
    taken. Else the first ``most`` that differ.
    """
    differ = [p for p in pairs if _both_finite(p) and not p.bit_equal]
    baseline = [p for p in differ if p.experiment == BASELINE]
    return baseline or differ[:most]


def _both_finite(pair: Pair) -> bool:
    both = (pair.reference, pair.tested)
    return all(isinstance(r, Result) and math.isfinite(r.grad_norm_preclip) for r in both)


def with_differences(pairs: Sequence[Pair], found: Mapping[str, Difference]) -> list[Pair]:
    """``pairs`` with what was measured of their gradients."""
    return [replace(p, difference=found.get(p.experiment, p.difference)) for p in pairs]


def changes_of(pairs: Sequence[Pair]) -> list[Change]:
    """What changed, each experiment once; nothing for what arithmetic explains."""
    return [change for pair in pairs if (change := _change(pair)) is not None]


def _change(pair: Pair) -> Change | None:
    if isinstance(pair.tested, SpikeReplayError):
        if isinstance(pair.reference, SpikeReplayError):
            return None  # not this trainer's doing
        told = f"cannot be replayed any more ({pair.tested.code}): {pair.tested}"
        return Change(pair, (told,), worse=True)
    if isinstance(pair.reference, SpikeReplayError):
        told = f"can be replayed now: {pair.tested.verdict}; the reference: {pair.reference}"
        return Change(pair, (told,), worse=False)
    if pair.bit_equal and pair.reference.verdict is pair.tested.verdict:
        return None
    words = tuple(_words(pair, pair.reference, pair.tested))
    if not words:
        return None
    fell = compare(pair.tested.verdict, pair.reference.verdict) == "worse"
    return Change(pair, words, worse=fell or pair.experiment == BASELINE)


def _words(pair: Pair, reference: Result, tested: Result) -> Iterator[str]:
    if reference.verdict is not tested.verdict:
        yield f"verdict {reference.verdict} -> {tested.verdict}"
    if tested.nonfinite and not reference.nonfinite:
        yield f"not finite: {_few(tested.nonfinite)}"
    yield from _norm_words("norm", reference.grad_norm_preclip, tested.grad_norm_preclip, tested)
    carried = [_carried(r) for r in (reference, tested)]
    if None not in carried:
        label = "norm with carried old log-probabilities"
        yield from _norm_words(label, carried[0] or 0.0, carried[1] or 0.0, tested)
    if pair.difference is not None:
        told = pair.difference.describe(DISTANCE.get(tested.dtype, max(DISTANCE.values())))
        if told is not None:
            yield told


def _few(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more; a spoilt loss spoils every parameter."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _norm_words(label: str, before: float, after: float, tested: Result) -> Iterator[str]:
    if not math.isfinite(after) or not math.isfinite(before):
        return  # told by the verdict
    band = noise_of(tested.dtype, tested.device).relative
    off = relative_difference(after, before)
    if before == after or (off is not None and off <= band):
        return
    by = f" ({after / before - 1:+.2%}, arithmetic explains {band:.0e})" if before else ""
    yield f"{label} {before:.7g} -> {after:.7g}{by}"


def _carried(result: Result) -> float | None:
    found = [o.grad_norm_preclip for o in result.old if o.old == "carried"]
    return found[0] if found else None


def follows_baseline(change: Change, changes: Sequence[Change]) -> bool:
    """Whether ``change`` says of a method only what its case's baseline says already.

    Such are methods that stand behind the same gate (``not_reproduced``, say) or the same error.
    """
    if change.pair.experiment == BASELINE:
        return False
    first = [c for c in changes if (c.pair.case, c.pair.experiment) == (change.pair.case, BASELINE)]
    mine = change.pair.tested
    theirs = first[0].pair.tested if first else None
    if isinstance(mine, Result) and isinstance(theirs, Result):
        return mine.verdict is theirs.verdict
    return isinstance(mine, SpikeReplayError) and str(mine) == str(theirs)


def reference_faults(pairs: Sequence[Pair]) -> list[str]:
    """Baselines that the reference itself does not reproduce: little can be said beside them."""
    told = []
    for pair in pairs:
        if pair.experiment != BASELINE:
            continue
        if isinstance(pair.reference, SpikeReplayError):
            told.append(f"{pair.case}: the reference cannot replay it: {pair.reference}")
        elif pair.reference.verdict is not Verdict.REPRODUCED:
            told.append(
                f"{pair.case}: under the reference too the baseline is {pair.reference.verdict}: "
                f"{pair.reference.reason}"
            )
    return told
