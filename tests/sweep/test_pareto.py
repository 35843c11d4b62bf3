"""The Pareto front: by hand, and on drawn points."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from replay_lib.sweep.pareto import Point, dominates, front_of


def point(name: str, reduction: float, retained: float, quiet: float | None) -> Point:
    return Point(name=name, reduction=reduction, retained=retained, quiet_change=quiet)


def test_by_hand() -> None:
    points = [
        point("strong", 0.9, 0.6, 0.30),
        point("gentle", 0.3, 1.0, 0.00),
        point("worse than gentle", 0.3, 0.9, 0.00),
        point("between", 0.5, 0.8, 0.10),
        point("as between", 0.5, 0.8, 0.10),
        point("worse than strong", 0.8, 0.6, 0.31),
        point("quiet but weak", 0.31, 0.5, 0.0),
    ]
    front = front_of(points)
    assert [p.name for p in front.members] == [
        "strong",
        "as between",
        "between",
        "quiet but weak",
        "gentle",
    ]
    assert [(p.name, by.name) for p, by in front.dominated] == [
        ("worse than gentle", "gentle"),
        ("worse than strong", "strong"),
    ]


def test_without_a_quiet_control_two_axes_are_left() -> None:
    points = [point("a", 0.5, 0.9, None), point("b", 0.5, 0.8, None), point("c", 0.6, 0.7, None)]
    assert [p.name for p in front_of(points).members] == ["c", "a"]


def test_equal_points_do_not_dominate_each_other() -> None:
    one, other = point("a", 0.5, 0.9, 0.1), point("b", 0.5, 0.9, 0.1)
    assert not dominates(one, other) and not dominates(other, one)


# few values, so that ties and equal points are drawn often
LEVELS = st.sampled_from([-0.5, 0.0, 0.1, 0.25, 0.5, 1.0, math.nextafter(1.0, 2.0)])
POINTS = st.lists(st.tuples(LEVELS, LEVELS, LEVELS), max_size=30).map(
    lambda drawn: [point(f"p{n}", r, k, abs(q)) for n, (r, k, q) in enumerate(drawn)]
)


@given(POINTS)
def test_no_member_is_dominated_and_whoever_is_none_is(points: list[Point]) -> None:
    front = front_of(points)
    members = set(front.members)
    for one in members:
        assert not any(_beats(other, one) for other in points)
    for other, by in front.dominated:
        assert by in members and _beats(by, other)
    assert sorted(p.name for p in (*front.members, *(p for p, _ in front.dominated))) == sorted(
        p.name for p in points
    )


def _beats(one: Point, other: Point) -> bool:
    """As defined, axis by axis and apart from the code under test."""
    assert one.quiet_change is not None and other.quiet_change is not None
    better = [
        one.reduction - other.reduction,
        one.retained - other.retained,
        other.quiet_change - one.quiet_change,
    ]
    return min(better) >= 0 and max(better) > 0
