"""However rows are dealt out to ranks, the same figures come out: streaming is the whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from signal_rows import Row, view_of_rows

from replay_lib.analysis.signals.advantages import AdvantageStage
from replay_lib.analysis.signals.improbable import ImprobableStage
from replay_lib.analysis.signals.lengths import LengthStage
from replay_lib.analysis.signals.ratios import RatioStage
from replay_lib.analysis.signals.rewards import RewardStage
from replay_lib.analysis.signals.values import ValueStage

NUMBERS = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([float("nan"), float("-inf")]))


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    made = []
    for number in range(draw(st.integers(1, 6))):
        trained = draw(st.integers(0, 4))
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))
        values = [draw(st.lists(NUMBERS, min_size=trained, max_size=trained)) for _ in range(3)]
        made.append(
            Row(
                tokens=[*prompt, *([3] * trained)],
                trained=trained,
                advantage=values[0],
                old=values[1],
                rollout=values[2],
                turns=draw(st.integers(0, 2)),
                reward=draw(st.sampled_from([0.0, 1.0])),
                index=draw(st.sampled_from([number, -1])),
                trajectory=draw(st.integers(0, 3)),
            )
        )
    return made


def collected(ranks: list[list[Row]]) -> dict[str, Any]:
    """Every stage's figures; rows by their place in the whole batch."""
    ratio = RatioStage("old", "rollout", "rollout")
    stages: list[Any] = [AdvantageStage(), LengthStage(), RewardStage(), ValueStage()]
    improbable = ImprobableStage()
    for number, some in enumerate(ranks):
        view = view_of_rows(some, number)
        for stage in (*stages, improbable):
            stage.add(view)
        old, rollout = view.on_loss("old_logprobs"), view.on_loss("rollout_logprobs")
        assert old is not None and rollout is not None
        ratio.add(view, old, rollout)
    advantages = stages[0].result().model_dump(exclude={"ranks"})
    return {
        "advantages": advantages,
        "lengths": stages[1].result().model_dump(),
        "rewards": stages[2].result().model_dump(),
        "trajectories": stages[2].trajectory_result().model_dump(exclude={"most"}),
        "repeated": (len(stages[2].repeated), stages[2].repeated_indexes, len(stages[2].flat())),
        "values": [column.model_dump() for column in stages[3].result()],
        "bad": {k: (b.on_loss_tokens, b.elsewhere) for k, b in stages[3].bad.items()},
        "ratio": ratio.result().model_dump(),
        "improbable": sorted(place.value for place in improbable.rows),
    }


def same(found: Any, expected: Any) -> bool:
    """Equal, floats up to the order of float64 sums."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, rel=1e-9, abs=1e-9))
    return bool(found == expected)


@settings(max_examples=20)
@given(rows(), st.integers(0, 6), st.integers(0, 6))
def test_ranks_give_what_one_rank_gives(whole: list[Row], first: int, second: int) -> None:
    low, high = sorted((first % (len(whole) + 1), second % (len(whole) + 1)))
    parts = [part for part in (whole[:low], whole[low:high], whole[high:]) if part]
    found, expected = collected(parts), collected([whole])
    different = {k: (found[k], expected[k]) for k in expected if not same(found[k], expected[k])}
    assert not different
