"""One backward serves all that ask bit-equal things of it, and nobody else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from replay_lib.engine import backwards
from replay_lib.engine.backwards import Asked, distinct
from replay_lib.engine.gradients import GradientCollector, digest

ONES = torch.ones(2, 3)


def shared(*asked: tuple[Tensor, Tensor | None, bool]) -> list[list[int]]:
    """Who goes with whom."""
    collector = GradientCollector(nn.Linear(2, 2))
    each = [Asked((g, e), collector.new_buffers(), alone) for g, e, alone in asked]
    numbers = {id(one.buffers): number for number, one in enumerate(each)}
    return [[numbers[id(b)] for b in backward.buffers] for backward in distinct(each)]


def test_bit_equal_questions_share_a_backward() -> None:
    assert shared((ONES, None, False), (2 * ONES, None, False), (ONES.clone(), None, False)) == [
        [0, 2],
        [1],
    ]


def test_the_last_bit_and_the_entropy_part_them_and_a_sign_of_zero_does_not() -> None:
    nearly = torch.nextafter(ONES, 2 * ONES)
    zero = torch.zeros(2, 3)
    assert len(shared((ONES, None, False), (nearly, None, False))) == 2
    assert shared((zero, zero, False), (-zero, -zero, False)) == [[0, 1]]
    assert len(shared((ONES, zero, False), (ONES, ONES, False), (ONES, None, False))) == 3
    nan = torch.full((2, 3), torch.nan)
    assert shared((nan, None, False), (nan.clone(), None, False)) == [[0, 1]]


def test_whoever_is_alone_stays_alone() -> None:
    assert shared(
        (ONES, None, True), (ONES, None, False), (ONES, None, True), (ONES, None, False)
    ) == [
        [0],
        [1, 3],
        [2],
    ]


def test_nothing_is_read_off_the_device_where_there_is_nothing_to_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backwards, "_bits", None)
    assert shared((ONES, None, False)) == [[0]]
    assert shared((ONES, None, True), (ONES, None, False), (ONES, None, True)) == [[0], [1], [2]]
    with pytest.raises(TypeError):  # two that could share are compared
        shared((ONES, None, False), (ONES, None, False))


def test_every_one_gets_the_whole_gradient() -> None:
    model = nn.Linear(3, 2)
    collector = GradientCollector(model)
    one, other, apart = (collector.new_buffers() for _ in range(3))
    for buffers in ((one, other), (apart,)):
        collector.current = buffers
        model(ONES).square().sum().backward()
    assert digest(one) == digest(other) == digest(apart)
    assert one.flat.abs().sum() > 0
