"""A case opened, replayed and judged, with an engine that has no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fake_engine
import pytest

from replay_lib import run
from replay_lib.case import Case, Limit
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.errors import BatchError, EngineError, UsageError
from replay_lib.expected import Expected
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


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """What was opened, asked and closed, in order, of one kind or several."""
    file = tmp_path / "engine.log"
    monkeypatch.setenv(fake_engine.LOG, str(file))

    def told(kinds: str) -> list[str]:
        lines = [line.split(" ", 1)[1] for line in file.read_text().splitlines()]
        short = [line.replace(f"{SNAPSHOT}", "spike").replace(f"{tmp_path}/", "") for line in lines]
        return [line for line in short if line.split()[0] in kinds.split()]

    return told


Log = Callable[[str], list[str]]


@pytest.fixture
def with_quiet(tmp_path: Path) -> Case:
    """The embedded spike with a quiet control whose norm was 2, 0.95 x the median."""
    return Case(
        name="c", snapshot=SNAPSHOT, quiet=fake_engine.quiet_snapshot(tmp_path / "quiet", SNAPSHOT)
    )


def replayed(monkeypatch: pytest.MonkeyPatch, case: Case, *names: str) -> run.Replayed:
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    return run.replay_case(case, [Experiment.parse(n) for n in names], run.ReplayOptions())


# --- requests ----------------------------------------------------------------------------------


def test_the_second_baseline_goes_with_the_first_experiments(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    case = Case.from_snapshot(SNAPSHOT)
    done = replayed(monkeypatch, case, *run.RECORDED_METHODS)
    assert log("ask") == ["ask baseline", f"ask baseline {' '.join(run.RECORDED_METHODS)}"]
    assert [r.experiment for r in done.results] == ["baseline", *run.RECORDED_METHODS]


def test_a_baseline_alone_is_replayed_twice(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    replayed(monkeypatch, Case.from_snapshot(SNAPSHOT))
    assert log("ask") == ["ask baseline", "ask baseline"]


def test_a_second_baseline_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([fake_engine.RECORDED, fake_engine.RECORDED * (1 + 1e-7)])

    class Restless(fake_engine.FakeEngine):
        def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
            for one in super().run_many(experiments):
                norm = one.grad_norm_preclip if one.experiment.mitigations else next(answers)
                digest = f"digest of {norm}"
                yield one.model_copy(update={"grad_norm_preclip": norm, "digest": digest})

    monkeypatch.setattr(run, "open_engine", Restless)
    case, asked = Case.from_snapshot(SNAPSHOT), [Experiment.parse("disable-routing-replay")]
    for result in run.replay_case(case, asked, run.ReplayOptions()).results:
        assert result.deterministic is False
        assert result.repeat_spread == pytest.approx(1e-7, rel=1e-3)


def test_repeats_are_requests_of_their_own_and_the_last_goes_with_the_experiments(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    norms = iter([8.442, 8.440, 8.441, 8.443])

    class Restless(fake_engine.FakeEngine):
        def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
            for one in super().run_many(experiments):
                norm = one.grad_norm_preclip if one.experiment.mitigations else next(norms)
                yield one.model_copy(update={"grad_norm_preclip": norm, "digest": f"{norm}"})

    monkeypatch.setattr(run, "open_engine", Restless)
    case = Case(
        name="c",
        snapshot=SNAPSHOT,
        tolerance={"float32": Limit(value=1e-2, reason="as the norms here")},
    )
    asked = [Experiment.parse("disable-routing-replay")]
    done = run.replay_case(case, asked, run.ReplayOptions(repeats=4))
    assert log("ask") == ["ask baseline"] * 3 + ["ask baseline disable-routing-replay"]
    for result in done.results:
        assert (result.repeats, result.deterministic) == (4, False)
        assert result.repeat_spread == pytest.approx(0.003 / 8.4415)
        assert result.noise_band == result.repeat_spread


def test_fewer_than_two_repeats_are_refused() -> None:
    with pytest.raises(UsageError, match="repeats: found 1, expected 2 or more"):
        run.ReplayOptions(repeats=1)


def test_a_refusal_costs_neither_the_second_baseline_nor_the_others(
    monkeypatch: pytest.MonkeyPatch, log: Log, tmp_path: Path
) -> None:
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "refuse.log"))
    done = replayed(
        monkeypatch, Case.from_snapshot(SNAPSHOT), fake_engine.REFUSED, "disable-routing-replay"
    )
    assert [r.experiment for r in done.results] == ["baseline", "disable-routing-replay"]
    assert [r.experiment for r in done.refused] == [fake_engine.REFUSED]
    assert all(r.deterministic for r in done.results)


# --- the quiet control ---------------------------------------------------------------------------


def test_the_quiet_control_is_replayed_first_and_its_model_is_gone_then(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case, log: Log
) -> None:
    methods = ("disable-routing-replay", "balance-negative-advantages")
    done = replayed(monkeypatch, with_quiet, *methods)
    assert log("open ask close") == [
        *("open quiet", f"ask baseline {' '.join(methods)}", "close quiet"),
        *("open spike", "ask baseline", f"ask baseline {' '.join(methods)}", "close spike"),
    ]
    base, routed, balanced = (r.side_effect for r in done.results)
    assert base is not None and (base.change, base.verdict) == (0.0, Verdict.NOT_A_SPIKE)
    assert routed is not None and balanced is not None
    assert routed.model_dump(exclude={"reason"}) == {
        "quiet_norm": 2.1,
        "quiet_baseline_norm": 2.0,
        "change": pytest.approx(0.05),
        "verdict": Verdict.NOT_A_SPIKE,
        "quiet_norm_carried": None,
        "change_carried": None,
        "budget": 0.1,
        "cosine": 0.98,
        "cosine_carried": None,
        "cosine_budget": 0.95,
    }
    assert balanced.explain() == (
        "the quiet control's norm changes by -75.0%, cosine 0.980; "
        "beyond the budget: norm -75.0% (10% is allowed)"
    )
    assert [r.flags for r in done.results] == [(), (), (Flag.BEYOND_BUDGET,)]
    assert [r.cosine for r in done.results] == [None, 0.98, 0.98]
    assert [r.quiet_fault for r in done.results] == [None] * 3
    assert done.results[1].as_json()["side_effect"]["verdict"] == "not_a_spike"


def test_a_baseline_alone_needs_no_quiet_control(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case, log: Log
) -> None:
    (result,) = replayed(monkeypatch, with_quiet).results
    assert result.side_effect is None
    assert log("open") == ["open spike"]


def test_a_method_asked_for_later_never_meets_a_second_model(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case, log: Log
) -> None:
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    opened = run.OpenCase.open(with_quiet, run.ReplayOptions())
    for name in ("baseline", "disable-routing-replay", "disable-routing-replay"):
        result_of(opened, name)
    opened.close()
    assert log("open close") == [
        *("open spike", "close spike"),
        *("open quiet", "close quiet"),
        *("open spike", "close spike"),
    ]


def test_a_quiet_control_that_is_a_spike_is_red_and_said(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case, tmp_path: Path
) -> None:
    quiet = fake_engine.quiet_snapshot(tmp_path / "quiet-not", SNAPSHOT, 4.0)
    monkeypatch.setitem(fake_engine.QUIET_NORMS, "baseline", 4.0)
    case = with_quiet.model_copy(update={"quiet": quiet})
    expected = {"disable-routing-replay": Expected.one(Verdict.FAIL)}
    case = case.model_copy(update={"expected": expected})
    done = replayed(monkeypatch, case, "disable-routing-replay")
    assert not any(r.red for r in done.results)
    assert run.quiet_faults(done.results) == [
        "c: the quiet control is itself a spike: its baseline is 1.899 x the median, above the "
        "target 1.5"
    ]
    assert done.exit_code == 1


def test_a_quiet_control_that_does_not_come_out_again_is_red(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case
) -> None:
    monkeypatch.setitem(fake_engine.QUIET_NORMS, "baseline", 2.01)
    done = replayed(monkeypatch, with_quiet, "disable-routing-replay")
    (told,) = run.quiet_faults(done.results)
    assert told.startswith("c: the quiet control is not reproduced: ")
    assert done.exit_code == 1


def test_a_method_that_the_quiet_control_refuses_is_red_alone(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case
) -> None:
    class Choosy(fake_engine.FakeEngine):
        def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
            if "quiet" in self.snapshot.name and any("balance" in e.name for e in experiments):
                raise BatchError("batch of dp rank 0: row 70 of 64")
            yield from super().run_many(experiments)

    monkeypatch.setattr(run, "open_engine", Choosy)
    methods = ("balance-negative-advantages", "disable-routing-replay")
    asked = [Experiment.parse(name) for name in methods]
    done = run.replay_case(with_quiet, asked, run.ReplayOptions())
    assert (len(done.results), done.refused) == (3, ())
    assert run.quiet_faults(done.results) == [
        "c / balance-negative-advantages: it could not be replayed on the quiet control: "
        "batch of dp rank 0: row 70 of 64"
    ]
    last = done.results[2].side_effect
    assert last is not None and last.change == pytest.approx(0.05)


def test_a_quiet_control_that_cannot_be_used_leaves_the_verdicts_alone(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case, tmp_path: Path, log: Log
) -> None:
    (tmp_path / "quiet" / "axrl_metadata.json").unlink()
    done = replayed(monkeypatch, with_quiet, "balance-negative-advantages")
    assert [r.verdict for r in done.results] == [Verdict.REPRODUCED, Verdict.PARTIAL]
    (told,) = run.quiet_faults(done.results)
    assert "could not be replayed on the quiet control" in told and "axrl_metadata.json" in told
    assert log("open") == ["open spike"]


def test_a_worker_that_dies_on_the_quiet_control_is_ended(
    monkeypatch: pytest.MonkeyPatch, with_quiet: Case, log: Log
) -> None:
    class Dying(fake_engine.FakeEngine):
        def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
            for one in super().run_many(experiments):
                if "quiet" in self.snapshot.name and "balance" in one.experiment.name:
                    raise EngineError("the worker ended unexpectedly.")
                yield one

    monkeypatch.setattr(run, "open_engine", Dying)
    methods = ("disable-routing-replay", "balance-negative-advantages")
    asked = [Experiment.parse(name) for name in methods]
    done = run.replay_case(with_quiet, asked, run.ReplayOptions())
    first, second = (r.side_effect for r in done.results[1:])
    assert first is not None and first.fault is None  # it had arrived
    assert second is not None and second.reason == "the worker ended unexpectedly."
    assert log("open close") == ["open quiet", "close quiet", "open spike", "close spike"]


def test_a_method_that_changes_the_unit_is_measured_on_the_quiet_control(
    monkeypatch: pytest.MonkeyPatch, own: Path, with_quiet: Case
) -> None:
    norms = {"quiet": {"baseline": 2.0, "tenth-of-the-loss": 0.2}}
    engines = Engines({"iter_0000085": {"tenth-of-the-loss": 0.8}, **norms})
    opened = opened_case(monkeypatch, with_quiet, run.ReplayOptions(mitigations=(own,)), engines)

    other = result_of(opened, "disable-routing-replay")
    assert other.ratio_scaled is None  # its unit is the baseline's
    result = result_of(opened, "tenth-of-the-loss")
    assert result.rule is Verdict.FAIL  # 0.8 is 8 in the old unit
    assert result.ratio_scaled == pytest.approx(8.0 / 2.105910566806221)


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
        opened_case(monkeypatch, Case.from_snapshot(SNAPSHOT), run.ReplayOptions(), engines).start()
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


def test_what_is_known_is_not_replayed_again(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    case, options = Case.from_snapshot(SNAPSHOT), run.ReplayOptions()
    opened = opened_case(monkeypatch, case, options, Engines({}))
    for _ in range(2):
        result_of(opened, "baseline")
        result_of(opened, "disable-routing-replay")
    assert log("ask") == [
        "ask baseline",
        "ask baseline",  # on purpose
        "ask disable-routing-replay",
    ]
