"""Which pairs are tried, in which order, and which cannot differ from one of their halves."""

from __future__ import annotations

import pytest

from replay_lib.engine.protocol import MitigationCall, parse_calls
from replay_lib.methods import load_methods
from replay_lib.patch import Patch, Seam, mitigation, settings_patch
from replay_lib.sweep.pairs import Half, pairs_of
from replay_lib.sweep.writes import writes_of

SETTINGS = Seam.SETTINGS


def half(slug: str, seconds: float = 1.0, **more: object) -> Half:
    given = {"loss_only": True, "reduction": 0.2, "digest": slug} | more
    return Half(call=MitigationCall(slug=slug), seconds=seconds, **given)  # type: ignore[arg-type]


def names(halves: list[Half]) -> list[str]:
    return [pair.experiment.name for pair in pairs_of(halves).pairs]


def test_pairs_that_share_a_forward_come_first_then_the_cheaper_ones() -> None:
    halves = [
        half("r", 3.0, loss_only=False),
        half("a", 1.0),
        half("s", 2.0, loss_only=False),
        half("b", 1.5),
        half("c", 1.1),
    ]
    # a loss-only pair costs its dearer half, any other the dearer one of those with a forward
    assert names(halves) == [
        *("a+c", "a+b", "b+c"),
        *("a+s", "s+b", "s+c"),
        *("r+a", "r+b", "r+c", "r+s"),
    ]


def test_of_pairs_at_one_price_the_more_promising_comes_first() -> None:
    halves = [half("a", reduction=0.1), half("b", reduction=0.3), half("c", reduction=0.2)]
    assert names(halves) == ["b+c", "a+b", "a+c"]


def test_the_cost_of_a_pair() -> None:
    (pair,) = pairs_of([half("a", 1.0), half("b", 2.0)]).pairs
    assert pair.cost == (False, 2.0)
    (pair,) = pairs_of([half("a", 9.0), half("r", 2.0, loss_only=False)]).pairs
    assert pair.cost == (True, 2.0)


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (half("a"), half("a"), "one method with two sets of parameters"),
        (half("a", diagnostic=True), half("b", diagnostic=True), "both diagnostic"),
        (
            half("a", writes=frozenset({(SETTINGS, "loss_type"), (SETTINGS, "beta")})),
            half("b", writes=frozenset({(SETTINGS, "loss_type")})),
            "both overwrite settings loss_type",
        ),
    ],
)
def test_pairs_that_cannot_differ(one: Half, other: Half, reason: str) -> None:
    choice = pairs_of([one, other])
    assert choice.pairs == ()
    assert choice.skipped == ((f"{one.call.slug}+{other.call.slug}", reason),)


def test_a_field_of_another_seam_and_one_diagnostic_half_are_no_obstacle() -> None:
    one = half("a", diagnostic=True, writes=frozenset({(SETTINGS, "x")}))
    assert names([one, half("b", writes=frozenset({(Seam.MODEL, "x")}))]) == ["a+b"]


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("enable-token-mismatch-tis-max2", {(SETTINGS, "mismatch_token_clip_max")}),
        ("use-gspo-loss", {(SETTINGS, "loss_type"), (SETTINGS, "loss_agg_type")}),
        ("compute-router-in-float64", {(Seam.MODEL, "moe_router_dtype")}),
        ("balance-negative-advantages", set()),
        ("disable-routing-replay", set()),
        ("clip-global-norm", set()),
    ],
)
def test_what_a_method_overwrites(method: str, fields: set[tuple[Seam, str]]) -> None:
    assert writes_of(parse_calls(method), load_methods()) == fields


def test_a_patch_that_reads_its_settings_is_asked_as_far_as_it_goes() -> None:
    @mitigation(slug="halve-the-clip", family="f", summary="s", source="s")
    def halve_the_clip() -> Patch:
        plain = settings_patch(loss_type="ppo")

        def apply(settings: object) -> object:
            first = plain(settings)
            return first.replace(clip_ratio_low=first.clip_ratio_low / 2)

        return Patch(SETTINGS, apply)

    methods = {"halve-the-clip": halve_the_clip}
    assert writes_of(parse_calls("halve-the-clip"), methods) == {(SETTINGS, "loss_type")}
