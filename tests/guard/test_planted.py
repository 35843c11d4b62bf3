"""A user's trainer with one planted fault of each kind, caught in words that name it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_lib import run
from replay_lib.case import Case
from replay_lib.engine.session import ReplaySession
from replay_lib.guard import guarding
from replay_lib.guard.guarding import Guarded, guard
from replay_lib.guard.reference import Reference
from replay_lib.guard.report import lines
from replay_lib.run import ReplayOptions

CASES = Path(__file__).parents[2] / "spike_cases"
PLAIN, NATURAL = "axrl-plain-step85", "zoo-natural"
METHODS = {
    PLAIN: ["enable-token-mismatch-tis-max2", "mask-sequences-by-mismatch"],
    NATURAL: ["tighten-ratio-clip"],
}
REFERENCE = Reference("grpo", "grpo")

pytestmark = pytest.mark.xdist_group("guard-planted")


@pytest.fixture(scope="module")
def open_once() -> Iterator[None]:
    """The reference's session of a case is opened once and serves all trainers under test."""
    real, kept = run.open_engine, {}

    def opening(snapshot: Path, options: ReplayOptions) -> ReplaySession:
        if options.trainer != REFERENCE.trainer:
            return real(snapshot, options)
        if snapshot not in kept:
            session = kept[snapshot] = real(snapshot, options)
            session.end, session.close = session.close, lambda: None
        return kept[snapshot]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_engine", opening)
        patch.setattr(guarding, "open_engine", opening)
        yield
        for session in kept.values():
            session.end()


def guarded(fault: str, name: str) -> Guarded:
    case = Case.load(CASES / name / "case.yaml").model_copy(update={"quiet": None})
    options = ReplayOptions(device="cpu", trainer=f"planted:{fault}")
    return guard([case], METHODS[name], options, REFERENCE, lambda _: None)


#: By the trainer's fault: case, experiment that tells first, its verdict, words that name it.
FAULTS = {
    "without_clip": (NATURAL, "tighten-ratio-clip", "no_op", "verdict fail -> no_op; norm "),
    "without_sequence_mask": (
        PLAIN,
        "mask-sequences-by-mismatch",
        "no_op",
        "verdict degenerate -> no_op; norm 0 -> 8.44",
    ),
    "reversed_sign": (PLAIN, "baseline", "reproduced", "the gradient is reversed, x -1 (cosine"),
    "half_the_denominator": (
        PLAIN,
        "baseline",
        "not_reproduced",
        "the gradient is scaled by 2, its direction kept",
    ),
    "other_advantages": (PLAIN, "baseline", "not_reproduced", "the gradient turned: cosine -0.18"),
    "zero_over_zero": (
        PLAIN,
        "baseline",
        "non_finite",
        "not finite: dLoss/dlogprob of dp rank 0 row 0 token 0",
    ),
    "renamed_column": (
        PLAIN,
        "baseline",
        None,
        "cannot be replayed any more (trainer): trainer planted:renamed_column: its loss raised "
        "AttributeError",
    ),
}
QUICK = ("without_clip", "without_sequence_mask", "reversed_sign")


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAULTS]
)
def test_a_planted_fault_is_caught_in_its_own_words(open_once, fault):
    name, experiment, verdict, words = FAULTS[fault]
    found = guarded(fault, name)
    assert found.exit_code("worse") == 1
    first = found.changes[0]
    assert (first.pair.experiment, first.worse) == (experiment, True)
    assert getattr(first.pair.tested, "verdict", None) == verdict
    assert words in first.told
    assert any(words in line for line in lines(found))


def test_a_sound_trainer_changes_nothing(open_once):
    found = guarded("sound", PLAIN)
    assert found.exit_code("changed") == 0 and found.changes == []
    assert all(pair.bit_equal for pair in found.pairs) and len(found.pairs) == 3
