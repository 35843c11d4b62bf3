"""Every registered method in the real engine: what it touches, and nothing of it stays."""

from __future__ import annotations

import pytest

from replay_lib.case import Case, builtin_cases
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.methods import callable_alone, load_methods
from replay_lib.patch import Seam
from replay_lib.rule import Verdict

pytestmark = pytest.mark.xdist_group("engine-plain")

BASELINE = Experiment.baseline()
REGISTERED = load_methods()
#: One that needs a parameter has a test of its own.
METHODS = {slug: REGISTERED[slug] for slug in callable_alone(REGISTERED)}
#: Verdicts of methods under which the gradient is the baseline's to the last bit.
IDLE = {Verdict.NO_OP, Verdict.NOT_APPLICABLE}
#: What is touched in the embedded snapshot: 263 tokens with routes in each of 4 MoE layers, 133 of
#: them loss tokens. Settings and model fields: those that get another value.
ROUTED, LAYERS, TRAINED = 263, 4, 133
TOUCHED = {
    "add-entropy-control": 1,
    "add-kl-to-reference": 2,
    "add-load-balancing-loss": 2,
    "add-router-z-loss": 1,
    "balance-negative-advantages": 34,  # loss tokens with a negative advantage
    "centre-advantages": TRAINED,
    "clip-advantages": 123,
    "clip-rollout-log-ratio": 44,
    "compute-router-in-float64": 1,
    "disable-merged-forward": 0,  # no row is a tree
    "disable-router-losses": 0,  # the model has none
    "disable-routing-replay": ROUTED * LAYERS,
    "enable-token-mismatch-tis-above-one": 83,
    "enable-token-mismatch-tis-below-one": 1,
    "enable-token-mismatch-tis-max2": 1,
    "enable-token-mismatch-tis-max5": 1,
    "mask-duplicated-rows": 0,  # no row is another's copy
    "mask-improbable-rows": TRAINED,  # all: a model that was not trained finds every row improbable
    "mask-improbable-tokens": 64,
    "mask-long-rows": 0,
    "mask-rows-by-advantage": 0,
    "mask-sequences-by-mismatch": 2,
    "mask-tokens-by-icepop": 2,
    "normalise-advantages": TRAINED,
    "replay-r3-on-loss-tokens-only": (ROUTED - TRAINED) * LAYERS,
    "replay-r3-on-prompt-tokens-only": TRAINED * LAYERS,
    "tighten-dual-clip": 2,
    "tighten-ratio-clip": 2,
    "use-current-routing-at-turn-borders": 348,
    "use-current-routing-for-first-moe-layer": ROUTED,
    "use-current-routing-from-moe-layer": ROUTED * (LAYERS - 1),
    "use-current-routing-in-one-moe-layer": ROUTED,
    "use-current-routing-on-disagreement": 55,
    "use-grpo-loss": 1,
    "use-gspo-loss": 2,
    "use-kimi-loss": 2,
    "use-old-logprobs-as-ratio-base": 0,  # they are the base already
    "use-rollout-logprobs-as-ratio-base": 1,
    "use-sequence-denominator": 1,
    "use-sequence-mean-aggregation": 1,
    "use-sequence-turn-denominator": 2,
    "use-sigmoid-router-scores": 1,
    "use-tis-loss": 1,
    "use-topr-loss": 1,
    "veto-sequences-by-token-mismatch": 1,
}


@pytest.fixture(scope="module")
def baseline(plain: ReplaySession) -> Outcome:
    return plain.run(BASELINE)


def test_a_count_is_known_of_every_method_that_acts_before_the_norm() -> None:
    assert set(TOUCHED) == {slug for slug, m in METHODS.items() if not m.after_norm}


@pytest.mark.parametrize("slug", METHODS)
def test_it_touches_what_it_says_and_the_baseline_comes_out_again(
    plain: ReplaySession, baseline: Outcome, slug: str
) -> None:
    expected = Case.load(builtin_cases() / "axrl-plain-step85").expected[slug].verdicts
    outcome = plain.run(Experiment.parse(slug))
    assert (outcome.digest == baseline.digest) in {verdict in IDLE for verdict in expected}
    assert set(outcome.touched) == set(METHODS[slug].seams)
    assert sum(outcome.touched.values()) == TOUCHED.get(slug, 0)
    assert plain.run(BASELINE).digest == baseline.digest


def test_no_method_leaves_a_trace_where_all_are_replayed_together(
    plain: ReplaySession, baseline: Outcome
) -> None:
    outcomes = list(plain.run_many([Experiment.parse(slug) for slug in METHODS]))
    assert [o.experiment.name for o in outcomes] == list(METHODS)
    assert {s for o in outcomes for s in o.touched} == set(Seam) - {Seam.WEIGHTS}
    assert plain.run(BASELINE).digest == baseline.digest
