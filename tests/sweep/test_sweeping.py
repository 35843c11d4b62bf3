"""A search as a user runs it, with an engine that has no model."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from cli_ran import Ran

from replay_lib import run
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.errors import BatchError
from replay_lib.expected import Expected
from replay_lib.record.results_file import read_results, write_results
from replay_lib.rule import Verdict
from replay_lib.run import ReplayOptions
from replay_lib.sweep import sweeping
from replay_lib.sweep.sweeping import Swept, sweep

TESTS = Path(__file__).parents[1]
SNAPSHOT = TESTS.parent / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
#: Norms, median 2.1059: all but the last two help.
NORMS = {
    "baseline": fake_engine.RECORDED,
    "clip-advantages": 2.5,
    "mask-long-rows": 2.6,
    "tighten-ratio-clip": 7.0,
    "use-tis-loss": 9.0,
    "mask-duplicated-rows": fake_engine.RECORDED,
}
METHODS = tuple(NORMS)[1:]
PAIRS = (
    "clip-advantages+mask-long-rows",
    "clip-advantages+tighten-ratio-clip",
    "mask-long-rows+tighten-ratio-clip",
)
VERSIONS = {"torch": "none"}  # those of the engine without a model


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    monkeypatch.setattr(fake_engine, "NORMS", NORMS | {p: 2.3 + i for i, p in enumerate(PAIRS)})
    monkeypatch.setattr(sweeping, "versions", lambda: VERSIONS)
    monkeypatch.setenv(fake_engine.LOG, str(tmp_path / "engine.log"))


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], list[str]]:
    """What was replayed since the last call, the baselines left out."""
    file = tmp_path / "engine.log"

    def told() -> list[str]:
        lines = file.read_text().splitlines() if file.exists() else []
        file.write_text("")
        ran = [line.split(" run ")[1] for line in lines if " run " in line]
        return [name for name in ran if name != "baseline"]

    return told


def searched(case: Case | None = None, **more: Any) -> Swept:
    case = case or Case.from_snapshot(SNAPSHOT)
    return sweep(case, [Experiment.parse(m) for m in METHODS], ReplayOptions(), **more)


def test_single_methods_then_pairs_of_what_helped(log: Callable[[], list[str]]) -> None:
    swept = searched()
    assert log() == [*METHODS, *PAIRS]
    assert swept.pairs == PAIRS
    assert swept.skipped == (
        ("use-tis-loss", "no reduction beyond noise"),
        ("mask-duplicated-rows", "no_op"),
    )
    assert [p.name for p in swept.front.members] == [PAIRS[0]]
    assert [r.experiment for r in swept.results] == ["baseline", *METHODS, *PAIRS]


def test_of_a_pair_that_no_case_lists_nothing_is_expected() -> None:
    methods = [Experiment.parse(m) for m in METHODS[:2]]  # both pass
    swept = sweep(Case.from_snapshot(SNAPSHOT), methods, ReplayOptions())
    assert swept.exit_code == 0
    fake_engine.NORMS[PAIRS[0]] = 8.0
    swept = sweep(Case.from_snapshot(SNAPSHOT), methods, ReplayOptions())
    assert swept.results[-1].verdict is Verdict.FAIL and swept.exit_code == 0
    listed = Case.from_snapshot(SNAPSHOT).model_copy(
        update={"expected": {PAIRS[0]: Expected.one(Verdict.PASS)}}
    )
    assert sweep(listed, methods, ReplayOptions()).exit_code == 1


@pytest.mark.parametrize("budget", [1, 4, 5, 6, 7, 8, 60])
def test_never_more_than_the_budget(budget: int, log: Callable[[], list[str]]) -> None:
    swept = searched(budget=budget)
    assert log() == [*METHODS, *PAIRS][:budget]
    assert swept.untried == METHODS[budget:]
    # with one method there is no pair, with two there is one, with more of them all three
    known = PAIRS[: {1: 0}.get(budget, 3)]
    assert (*swept.pairs, *swept.left) == known
    assert len(swept.pairs) == max(0, min(3, budget - len(METHODS)))


def test_methods_with_a_forward_of_their_own_come_after_the_others(
    log: Callable[[], list[str]],
) -> None:
    methods = ["disable-routing-replay", *METHODS]
    sweep(
        Case.from_snapshot(SNAPSHOT),
        [Experiment.parse(m) for m in methods],
        ReplayOptions(),
        budget=5,
    )
    assert log() == list(METHODS)


def test_a_refused_method_leaves_the_others_their_forward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []

    class Refusing(fake_engine.FakeEngine):
        def run_many(self, experiments: Any) -> Any:
            asked.append([e.name for e in experiments])
            if any("tighten-ratio-clip" in e.name for e in experiments):
                raise BatchError("batch of dp rank 0: column 'loss_mask' is absent")
            return super().run_many(experiments)

    monkeypatch.setattr(run, "open_engine", Refusing)
    swept = searched()
    assert [one.experiment for one in swept.refused] == ["tighten-ratio-clip"]
    assert swept.pairs == PAIRS[:1]
    assert swept.exit_code == BatchError.exit_code
    whole = ["baseline", "baseline", *METHODS]
    assert asked[:2] == [["baseline"], whole[1:]]
    # halves, until it is alone
    assert asked[2:] == [
        ["baseline"],
        list(METHODS[:2]),
        list(METHODS[2:]),
        [METHODS[2]],
        list(METHODS[3:]),
        list(PAIRS[:1]),
    ]


def test_a_refused_baseline_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(fake_engine.FakeEngine):
        def run_many(self, experiments: Any) -> Any:
            raise BatchError("batch of dp rank 0: column 'loss_mask' is absent")

    monkeypatch.setattr(run, "open_engine", Refusing)
    with pytest.raises(BatchError, match="loss_mask"):
        searched()


# --- what is on the front ----------------------------------------------------------------------


def test_the_front_is_of_three_axes_and_tells_who_has_no_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quiet = fake_engine.quiet_snapshot(tmp_path / "quiet", SNAPSHOT)
    monkeypatch.setattr(fake_engine, "QUIET_NORMS", {"baseline": 2.0, "clip-advantages": 2.1})
    monkeypatch.setattr(fake_engine, "RETAINED", {"clip-advantages": 0.95, "mask-long-rows": 0.4})
    fake_engine.NORMS["tighten-ratio-clip"] = math.nan
    swept = searched(Case(name="c", snapshot=SNAPSHOT, quiet=quiet))
    (member,) = swept.front.members
    assert member.name == "clip-advantages"
    assert member.reduction == pytest.approx(1 - 2.5 / fake_engine.RECORDED)
    assert (member.retained, member.quiet_change) == (0.95, pytest.approx(0.05))
    assert swept.front.excluded == (
        ("mask-long-rows", "degenerate"),
        ("tighten-ratio-clip", "non_finite"),
        ("use-tis-loss", "no reduction beyond noise"),
        ("mask-duplicated-rows", "no_op"),
    )
    assert swept.pairs == ()


def test_nothing_is_on_the_front_of_a_spike_that_was_not_reproduced() -> None:
    fake_engine.NORMS["baseline"] = 8.0
    swept = searched()
    assert swept.front.members == () and swept.pairs == ()
    assert {why for _, why in swept.front.excluded} == {"not_reproduced"}


# --- killed and run again ----------------------------------------------------------------------

KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(TESTS)!r})
import fake_engine
from replay_lib import run
from replay_lib.cli import main
from replay_lib.sweep import sweeping

class Killed(fake_engine.FakeEngine):
    def run_many(self, experiments):
        for number, outcome in enumerate(super().run_many(experiments)):
            if number == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)
            yield outcome

fake_engine.NORMS = {NORMS | {p: 2.3 + i for i, p in enumerate(PAIRS)}!r}
run.open_engine = Killed
sweeping.versions = lambda: {VERSIONS!r}
main(["sweep", {str(SNAPSHOT)!r}, *{METHODS!r}, "--combine", "2", "--results", sys.argv[2]])
"""


def test_a_killed_search_goes_on_where_it_was(tmp_path: Path, log: Callable[[], list[str]]) -> None:
    file = tmp_path / "results.jsonl"
    command = [sys.executable, "-c", KILLED, "4", str(file)]
    ended = subprocess.run(command, check=False, capture_output=True, cwd=TESTS.parent)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    # the outcomes of a request are the second baseline's and three methods' by then
    assert [r.experiment for r in read_results(file)] == ["baseline", *METHODS[:3]]
    log()
    swept = searched(file=file)
    assert log() == [*METHODS[3:], *PAIRS]
    assert swept.resumed == 4
    whole = ["baseline", *METHODS, *PAIRS]
    assert [r.experiment for r in swept.results] == whole
    assert [r.experiment for r in read_results(file)] == whole
    fresh = searched()
    assert [p.name for p in swept.front.members] == [p.name for p in fresh.front.members]
    assert [r.digest for r in swept.results] == [r.digest for r in fresh.results]


@pytest.mark.parametrize("dies_after", range(1, len(METHODS) + len(PAIRS)))
def test_it_goes_on_from_wherever_it_ended(
    dies_after: int, tmp_path: Path, log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [dies_after]
    real = fake_engine.outcome

    def dying(experiment: Experiment, quiet: bool = False) -> Outcome:
        left[0] -= bool(experiment.mitigations)
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(experiment, quiet)

    monkeypatch.setattr(fake_engine, "outcome", dying)
    with pytest.raises(KeyboardInterrupt):
        searched(file=tmp_path / "r.jsonl")
    log()
    left[0] = 100
    swept = searched(file=tmp_path / "r.jsonl")
    assert log() == [*METHODS, *PAIRS][dies_after:]
    assert swept.resumed == dies_after + 1  # and the baseline


def test_a_search_that_is_over_opens_nothing(tmp_path: Path, log: Callable[[], list[str]]) -> None:
    searched(file=tmp_path / "r.jsonl")
    (tmp_path / "engine.log").unlink()
    swept = searched(file=tmp_path / "r.jsonl")
    assert not (tmp_path / "engine.log").exists()
    assert swept.resumed == 1 + len(METHODS) + len(PAIRS)


@pytest.mark.parametrize(
    "change",
    [
        {"case_digest": "of other files"},
        {"trainer": "axrl"},
        {"dtype": "bfloat16"},
        {"device": "cuda (NVIDIA H200)"},
        {"backend": "axrl"},
        {"versions": {"torch": "2.0"}},
        {"against": "use-tis-loss"},
        {"case": "another"},
    ],
)
def test_results_of_another_setting_do_not_count(
    change: dict[str, Any], tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    file = tmp_path / "r.jsonl"
    searched(file=file)
    before = read_results(file)
    keep = "against" in change  # a baseline is compared with nothing
    other = [r if r.is_baseline and keep else r.model_copy(update=change) for r in before]
    write_results(file, other)
    log()
    swept = searched(file=file)
    assert log() == [*METHODS, *PAIRS]
    assert swept.resumed == (1 if keep else 0)


def test_results_beside_another_baseline_do_not_count(
    tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    file = tmp_path / "r.jsonl"
    searched(file=file, budget=3)
    log()
    fake_engine.NORMS["baseline"] = fake_engine.RECORDED * (1 + 1e-6)  # reproduced as well
    swept = searched(file=file)
    assert sorted(log()) == sorted([*METHODS, *PAIRS])
    assert swept.resumed == 0
    (note,) = swept.notes
    assert note.startswith("4 earlier results do not count, the baseline's gradient is another now")


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def spike_replay(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: Ran(capsys, *arguments)


def test_the_command_prints_front_and_remarks(spike_replay: Any, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    arguments = ("sweep", SNAPSHOT, *METHODS, "--combine", "2", "--budget", "7")
    ran = spike_replay(*arguments, "--results", file)
    assert "7 of at most 7 experiments: 5 single methods, 2 pairs" in ran.out
    assert f"no room for 1 more pairs, the next is {PAIRS[2]}" in ran.out
    assert "not on the front, no_op: mask-duplicated-rows" in ran.out
    assert "on the front" in ran.out.splitlines()[-2]
    assert ran.out.splitlines()[-1].split()[:3] == [PAIRS[0], "72.8%", "90.0%"]
    assert f"7/8 {PAIRS[0]}: pass" in ran.err
    again = spike_replay(*arguments, "--results", file)
    assert "resumed: 8 results of an earlier run were not replayed again" in again.out
    document = spike_replay(*arguments, "--json").document["sweep"]
    assert [one["experiment"] for one in document["front"]] == [PAIRS[0]]
    assert document["front"][0]["verdict"] == "pass"
    assert document["experiments"] == 7 and document["resumed"] == 0
    assert document["left"] == [PAIRS[2]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--budget", "9"], "--budget: found no --combine, which it bounds; expected both"),
        (["--combine", "3"], "--combine: found 3, expected 2: pairs are searched"),
        (["--combine", "2", "--budget", "0"], "--budget: found 0, expected 1 experiment or more"),
    ],
)
def test_options_that_make_no_sense(spike_replay: Any, given: list[str], told: str) -> None:
    ran = spike_replay("sweep", SNAPSHOT, *given)
    assert ran.code == 2 and told in ran.err
