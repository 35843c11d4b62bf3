"""How experiments are written, and what crosses the process boundary."""

from __future__ import annotations

import json
import math

import pytest

from replay_lib.engine.protocol import Experiment, MitigationCall, Outcome, Retained
from replay_lib.errors import PatchError
from replay_lib.methods import load_methods, resolve


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("baseline", []),
        ("", []),
        ("a-b", [("a-b", {})]),
        ("a:x=1,y=2.5+b", [("a", {"x": 1, "y": 2.5}), ("b", {})]),
        ("a:eps=1e-3", [("a", {"eps": 0.001})]),
        ("a:on=true,off=False", [("a", {"on": True, "off": False})]),
        ("a:none=none,word=abc", [("a", {"none": None, "word": "abc"})]),
        ("my.module:method", [("my.module:method", {})]),
        ("module:method:x=1", [("module:method", {"x": 1})]),
    ],
)
def test_experiments_as_they_are_written(text, calls):
    expected = tuple(MitigationCall(slug=slug, params=params) for slug, params in calls)
    assert Experiment.parse(text).mitigations == expected


def test_a_name_can_be_written_again():
    name = Experiment.parse("b:y=2,x=1+c").name
    assert name == "b:x=1,y=2+c"
    assert Experiment.parse(name).name == name
    assert Experiment.baseline().name == "baseline"


@pytest.mark.parametrize("text", ["balance-negative-advantages:eps", "a:=1", "a:x="])
def test_a_parameter_without_name_or_value_is_refused(text):
    with pytest.raises(PatchError, match="expected name=value"):
        Experiment.parse(text)


@pytest.mark.parametrize("text", ["a:x=2,x=3", "a:x=2,y=1, x =2", "module:method:x=1,x=1"])
def test_a_parameter_that_is_written_twice_is_refused(text):
    with pytest.raises(PatchError) as caught:
        Experiment.parse(text)
    assert str(caught.value) == (f"mitigation {text}: found x twice, expected every parameter once")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("balance-negative-advantages:eps=abc", "eps: found 'abc', expected a number"),
        ("balance-negative-advantages:eps=true", "eps: found True, expected a number"),
        ("balance-negative-advantages:scale_up=1", "scale_up: found 1, expected true or false"),
        ("use-current-routing-for-first-moe-layer:layers=1.5", "expected a whole number"),
        ("balance-negative-advantages:eps=nan", "eps: found nan, expected a finite number"),
        ("balance-negative-advantages:eps=-inf", "eps: found -inf, expected a finite number"),
        ("enable-token-mismatch-tis-max2:clip_max=1e999", "found inf, expected a finite number"),
    ],
)
def test_a_parameter_of_another_kind_is_refused_before_anything_starts(text, words):
    (call,) = Experiment.parse(text).mitigations
    with pytest.raises(PatchError) as caught:
        resolve(call, load_methods())
    assert words in str(caught.value)


def test_numbers_that_are_not_finite_travel_as_words():
    outcome = Outcome(
        experiment=Experiment.baseline(),
        grad_norm_preclip=math.nan,
        digest="0",
        loss=math.inf,
        denominator=1.0,
        param_norms={"w": -math.inf},
        touched={},
        seconds=0.0,
    )
    line = outcome.model_dump_json()
    plain = json.loads(line, parse_constant=lambda word: pytest.fail(f"bare {word}"))
    assert (plain["grad_norm_preclip"], plain["loss"]) == ("NaN", "Infinity")
    back = Outcome.model_validate(plain)
    assert math.isnan(back.grad_norm_preclip) and back.param_norms["w"] == -math.inf


def test_the_smallest_share_is_nan_where_one_is():
    assert Retained(tokens=0.5, advantage=0.2, dloss_dlogprob=1.0).smallest == 0.2
    assert math.isnan(Retained(tokens=0.5, advantage=math.nan, dloss_dlogprob=1.0).smallest)
