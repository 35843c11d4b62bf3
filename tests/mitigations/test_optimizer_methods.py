"""Answers on the optimizer's side: what they let through, by hand. None touches the step."""

from __future__ import annotations

import math

import pytest
from hand_made import METHODS

from replay_lib.errors import PatchError
from replay_lib.patch import Norms

NORMS = Norms(
    norm=5.0,
    median=1.0,
    clip_grad=2.0,
    param_norms={"a": 3.0, "b": 4.0},
    quiet_param_norms={"a": 2.0, "b": 10.0},
)


def passed(slug: str, norms: Norms = NORMS, **params: object) -> float | None:
    answer = METHODS[slug].answer(params)
    assert answer is not None and METHODS[slug].patches(params) == ()
    return answer(norms)


def but(**changes: object) -> Norms:
    return Norms(**{**vars(NORMS), **changes})


def test_every_method_that_acts_after_the_norm_is_here():
    assert {s for s, m in METHODS.items() if m.after_norm} == {
        "adagc",
        "clip-global-norm",
        "skip-spiking-step",
        "zclip",
    }
    assert METHODS["disable-routing-replay"].answer() is None


def test_the_global_clip_is_megatrons():
    assert passed("clip-global-norm") == 5.0 * (1.0 / (5.0 + 1e-6))
    assert passed("clip-global-norm", but(norm=0.5)) == 0.5
    assert passed("clip-global-norm", max_norm=7.0) == 5.0


def test_a_step_far_above_the_median_is_skipped_and_others_are_clipped_as_the_run_clips():
    assert passed("skip-spiking-step") == 0.0
    assert passed("skip-spiking-step", ratio=5.0) == 5.0 * (2.0 / (5.0 + 1e-6))
    assert passed("skip-spiking-step", but(median=None)) == 5.0 * (2.0 / (5.0 + 1e-6))
    assert passed("skip-spiking-step", but(median=0.0, clip_grad=None)) == 5.0
    assert passed("skip-spiking-step", but(norm=math.nan)) == 0.0


def test_zclip_pulls_back_the_further_the_more():
    # s = 0.25, z = (5 - 1) / 0.25 = 16: 1 + 0.25 * 2.5^2 / 16
    assert passed("zclip") == 1.0 + 0.25 * 6.25 / 16
    assert passed("zclip", but(norm=1.625)) == 1.625  # z = 2.5 exactly
    assert passed("zclip", but(norm=0.1)) == 0.1
    assert passed("zclip", but(median=None)) is None


def test_adagc_bounds_each_parameter_by_its_quiet_norm():
    # a: min(3, 1.5 * 2) = 3, b: min(4, 15) = 4; then a: min(3, 1 * 2) = 2
    assert passed("adagc", factor=1.5) == 5.0
    assert passed("adagc", factor=1.0) == pytest.approx(20.0**0.5, rel=1e-15)
    assert passed("adagc", but(quiet_param_norms=None)) is None


@pytest.mark.parametrize(
    ("slug", "params"),
    [
        ("adagc", {"factor": 0.0}),
        ("clip-global-norm", {"max_norm": 0.0}),
        ("skip-spiking-step", {"ratio": -1.0}),
        ("zclip", {"z": 0.0}),
    ],
)
def test_bounds_that_make_no_sense_are_refused(slug, params):
    with pytest.raises(PatchError, match="> 0"):
        METHODS[slug].answer(params)
