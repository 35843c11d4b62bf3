"""The real engine on a case with a quiet control, and what the second baseline costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from replay_lib import run
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.session import ReplaySession
from replay_lib.rule import Verdict
from replay_lib.snapshot import open_snapshot, read_content, write_snapshot

ROOT = Path(__file__).parents[1]
SPIKE = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
METHODS = ("balance-negative-advantages", "disable-routing-replay")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded step in a run whose median was near its norm: an ordinary step."""
    content = replace(read_content(open_snapshot(SPIKE)), grad_norm_median=8.0)
    return write_snapshot(tmp_path_factory.mktemp("run") / "iter_0000085", content).path


def test_side_effects_and_a_second_baseline_bit_for_bit(
    quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[list[Outcome]] = []
    real = ReplaySession.run_many

    def recording(self: ReplaySession, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
        sessions.append([])
        for outcome in real(self, experiments):
            sessions[-1].append(outcome)
            yield outcome

    monkeypatch.setattr(ReplaySession, "run_many", recording)
    case = Case(name="c", snapshot=SPIKE, quiet=quiet)
    asked = [Experiment.parse(name) for name in METHODS]
    done = run.replay_case(case, asked, run.ReplayOptions(device="cpu"))

    on_quiet, (first,), (second, *_) = sessions
    assert [o.experiment.name for o in on_quiet] == ["baseline", *METHODS]
    # a backward of its own on a forward of its own, which a method that changes the loss shares
    assert (first.shared_forward, second.shared_forward) == (False, True)
    assert first.digest == second.digest
    assert all(r.deterministic and r.repeat_spread == 0.0 for r in done.results)
    for result in done.results[1:]:
        effect = result.side_effect
        assert effect is not None and effect.verdict is Verdict.NOT_A_SPIKE
        assert effect.change is not None and result.reduction is not None
        assert effect.change == pytest.approx(-result.reduction, abs=1e-12)  # it is the same step
    assert done.results[1].side_effect.change_carried is None
    assert done.results[2].side_effect.change_carried is not None
