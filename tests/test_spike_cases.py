"""The recorded spikes under every mitigation: the suite that this project is for."""

from __future__ import annotations

import pytest

from replay_lib.pytest_plugin import Quiet, Replay


def test_reproduction(replay: Replay) -> None:
    result = replay()
    assert not result.red, result.explain()


def test_mitigation(replay: Replay, mitigation: str) -> None:
    result = replay(mitigation)
    assert not result.red, result.explain()


def test_quiet_control(quiet: Quiet, mitigation: str) -> None:
    effect = quiet(mitigation)
    assert not effect.red, effect.explain()


@pytest.mark.gpu
def test_quiet_control_on_gpu(quiet: Quiet, mitigation: str) -> None:
    effect = quiet(mitigation)
    assert not effect.red, effect.explain()


@pytest.mark.gpu
def test_mitigation_on_gpu(replay: Replay, mitigation: str) -> None:
    result = replay(mitigation)
    assert not result.red, result.explain()
