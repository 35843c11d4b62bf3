"""A case opened, replayed and judged, with an engine that has no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import fake_engine
import pytest

from replay_lib import run
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.errors import CaseError, EngineError, PatchError
from replay_lib.methods import load_methods
from replay_lib.rule import Flag, Verdict

SNAPSHOT = Path(__file__).parents[1] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
OWN_METHODS = {
    "tenth_of_the_loss": "changes_unit=True",
    "clip_harder": "after_norm=True",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Two methods of a user: one changes the unit of the loss, one acts after the norm."""
    directory = tmp_path / "own"
    directory.mkdir()
    for name, trait in OWN_METHODS.items():
        slug = name.replace("_", "-")
        built = "()" if "after_norm" in trait else "settings_patch(clip_ratio_high=0.1)"
        (directory / f"{name}.py").write_text(
            "from replay_lib.patch import mitigation, settings_patch\n"
            f"@mitigation(slug={slug!r}, family='f', summary='s', source='s', {trait})\n"
            f"def {name}():\n    return {built}\n"
        )
    return directory


class Engines:
    """Engines by snapshot: the quiet one's norms are given, openings are counted."""

    def __init__(self, norms: dict[str, dict[str, float]]) -> None:
        self.norms = norms
        self.opened: list[str] = []
        self.closed: list[str] = []

    def __call__(self, snapshot: Path, options: run.ReplayOptions) -> fake_engine.FakeEngine:
        self.opened.append(snapshot.name)
        engines, norms = self, self.norms.get(snapshot.name, {})

        class Engine(fake_engine.FakeEngine):
            def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
                for one in super().run_many(experiments):
                    norm = norms.get(one.experiment.name, one.grad_norm_preclip)
                    digest = f"digest of {norm}"
                    yield one.model_copy(update={"grad_norm_preclip": norm, "digest": digest})

            def close(self) -> None:
                engines.closed.append(snapshot.name)

        return Engine(snapshot, options)


def opened_case(
    monkeypatch: pytest.MonkeyPatch, case: Case, options: run.ReplayOptions, engines: Engines
) -> run.OpenCase:
    monkeypatch.setattr(run, "open_engine", engines)
    return run.OpenCase.open(case, options)


def result_of(opened: run.OpenCase, text: str) -> run.Result:
    (result,) = opened.results(run.parse_experiments([text], "baseline", opened.methods))
    return result


def test_a_method_that_changes_the_unit_is_measured_on_the_quiet_control(
    monkeypatch: pytest.MonkeyPatch, own: Path, tmp_path: Path
) -> None:
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    case = Case(name="c", snapshot=SNAPSHOT, quiet=quiet)
    norms = {"quiet": {"baseline": 2.0, "tenth-of-the-loss": 0.2}}
    engines = Engines({"iter_0000085": {"tenth-of-the-loss": 0.8}, **norms})
    opened = opened_case(monkeypatch, case, run.ReplayOptions(mitigations=(own,)), engines)

    other = result_of(opened, "disable-routing-replay")
    assert (engines.opened, other.ratio_scaled) == (["iter_0000085"], None)  # not needed yet

    result = result_of(opened, "tenth-of-the-loss")
    assert result.rule is Verdict.FAIL  # 0.8 is 8 in the old unit
    assert result.ratio_scaled == pytest.approx(8.0 / 2.105910566806221)
    assert engines.opened == ["iter_0000085", "quiet"]
    assert engines.closed == ["quiet"]
    assert result_of(opened, "tenth-of-the-loss").digest == result.digest
    assert engines.opened == ["iter_0000085", "quiet"]


def test_without_a_quiet_control_a_changed_unit_is_flagged(
    monkeypatch: pytest.MonkeyPatch, own: Path
) -> None:
    case, options = Case.from_snapshot(SNAPSHOT), run.ReplayOptions(mitigations=(own,))
    opened = opened_case(monkeypatch, case, options, Engines({}))
    result = result_of(opened, "tenth-of-the-loss")
    assert (result.verdict, result.flags) == (Verdict.PASS, (Flag.UNIT_UNCHECKED,))
    assert result.status == "partial"


def test_an_answer_after_the_norm(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    norms = {"iter_0000085": {"clip-harder": fake_engine.RECORDED}}
    case, options = Case.from_snapshot(SNAPSHOT), run.ReplayOptions(mitigations=(own,))
    opened = opened_case(monkeypatch, case, options, Engines(norms))
    result = result_of(opened, "clip-harder")
    assert result.verdict is Verdict.NOT_APPLICABLE
    assert result.postclip_norm == pytest.approx(1.0, abs=1e-6)  # the run clipped at 1


def test_a_worker_is_ended_when_its_baseline_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines({})

    def die(*_: object) -> Iterator[Outcome]:
        raise EngineError("the worker ended unexpectedly.")

    monkeypatch.setattr(fake_engine.FakeEngine, "run_many", die)
    with pytest.raises(EngineError):
        opened_case(monkeypatch, Case.from_snapshot(SNAPSHOT), run.ReplayOptions(), engines)
    assert engines.closed == ["iter_0000085"]


def test_a_worker_that_dies_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines({})
    monkeypatch.setattr(run, "open_engine", engines)
    asked = [Experiment.parse("disable-routing-replay")]

    def die(self: fake_engine.FakeEngine, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
        if any(e.mitigations for e in experiments):
            raise EngineError("the worker ended unexpectedly.")
        yield from map(fake_engine.outcome, experiments)

    monkeypatch.setattr(fake_engine.FakeEngine, "run_many", die)
    with pytest.raises(EngineError):
        run.replay_case(Case.from_snapshot(SNAPSHOT), asked, run.ReplayOptions())
    assert engines.closed == ["iter_0000085"]


def test_what_is_known_is_not_replayed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    monkeypatch.setenv(fake_engine.LOG, str(log))
    case, options = Case.from_snapshot(SNAPSHOT), run.ReplayOptions()
    opened = opened_case(monkeypatch, case, options, Engines({}))
    for _ in range(2):
        result_of(opened, "baseline")
        result_of(opened, "disable-routing-replay")
    ran = [line.split(" ", 2)[2] for line in log.read_text().splitlines() if " run " in line]
    assert ran == [
        "baseline",
        "baseline",
        "disable-routing-replay",
    ]  # the baseline twice on purpose


def test_nothing_is_started_for_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = Engines({})
    monkeypatch.setattr(run, "open_engine", engines)
    with pytest.raises(PatchError, match="not registered"):
        run.parse_experiments(["no-such-method"], "baseline", load_methods())
    with pytest.raises(PatchError, match="not registered"):
        run.parse_experiments(["disable-routing-replay"], "no-such-method", load_methods())
    gone = Case(name="gone", snapshot=tmp_path / "iter_0000001")
    with pytest.raises(CaseError, match="no directory"):
        run.OpenCase.open(gone, run.ReplayOptions())
    assert engines.opened == []


def test_recorded_figures_are_the_snapshots() -> None:
    recorded = run.recorded_of(SNAPSHOT)
    assert recorded.norm == fake_engine.RECORDED
    assert (recorded.spike_ratio, recorded.dtype, recorded.clip_grad) == (2.0, "float32", 1.0)
