"""The pytest plugin, told as a user meets it. Every inner run is a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plugin_suite import ALL_AS_EXPECTED, SNAPSHOT, SUITE, Suite, make_suite


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return make_suite(pytester, monkeypatch)


def test_ids_are_case_then_mitigation(suite: Suite) -> None:
    suite.case("a")
    suite.case("b")
    result = suite.run("--collect-only", "-q", "-k", "reproduction or disable or balance")
    assert result.outlines[:6] == [
        "test_spikes.py::test_reproduction[a]",
        "test_spikes.py::test_mitigation[a-balance-negative-advantages]",
        "test_spikes.py::test_mitigation[a-disable-routing-replay]",
        "test_spikes.py::test_reproduction[b]",
        "test_spikes.py::test_mitigation[b-balance-negative-advantages]",
        "test_spikes.py::test_mitigation[b-disable-routing-replay]",
    ]
    assert suite.opened() == {}


def test_each_case_is_opened_once(suite: Suite) -> None:
    suite.case("a")
    suite.case("b")
    suite.run().assert_outcomes(passed=12)
    assert suite.opened() == {"iter_a": 1, "iter_b": 1}
    events = [line.split()[1:] for line in suite.log.read_text().splitlines()]
    kinds = [event[0] for event in events if event[0] in ("open", "close")]
    assert kinds == ["open", "close", "open", "close"]  # never two models at a time


QUIET_SUITE = f"""{SUITE}
def test_quiet_control(mitigation, quiet):
    effect = quiet(mitigation)
    assert not effect.red, effect.explain()
"""


def test_a_quiet_control_is_replayed_once_and_before_the_spike(suite: Suite) -> None:
    suite.pytester.makepyfile(test_spikes=QUIET_SUITE)
    suite.case("a", quiet=True)
    suite.case("b")
    result = suite.run()
    result.assert_outcomes(passed=17, deselected=5)  # b has no quiet control
    lines = [line.split(" ", 2)[1:] for line in suite.log.read_text().splitlines()]
    opened = [Path(path).name for kind, path in lines if kind == "open"]
    assert opened == ["quiet_a", "iter_a", "iter_b"]
    kinds = [kind for kind, _ in lines if kind in ("open", "close")]
    assert kinds == ["open", "close"] * 3
    first = next(names for kind, names in lines if kind == "ask")
    assert len(first.split()) == 6  # the baseline and all five methods at once
    result.stdout.fnmatch_lines(["balance-negative-advantages * -75% 0.980 *"])


def test_only_what_runs_is_replayed_on_the_quiet_control(suite: Suite) -> None:
    suite.pytester.makepyfile(test_spikes=QUIET_SUITE)
    suite.case("a", quiet=True)
    suite.run("-k", "quiet_control and disable").assert_outcomes(passed=1, deselected=10)
    asked = [
        line.split(" ", 2)[2] for line in suite.log.read_text().splitlines() if " ask " in line
    ]
    assert asked == ["baseline disable-routing-replay"]
    suite.log.unlink()
    suite.run("-k", "reproduction").assert_outcomes(passed=1, deselected=10)
    assert suite.opened() == {"iter_a": 1}


def test_a_quiet_control_that_is_a_spike_is_red(suite: Suite) -> None:
    suite.engine("fake_engine.QUIET_NORMS['baseline'] = 4.0\nfake_engine.install()")
    suite.pytester.makepyfile(test_spikes=QUIET_SUITE)
    suite.case("a", quiet=True, quiet_norm=4.0)
    result = suite.run("-n", "2")
    result.assert_outcomes(passed=6, failed=5)
    assert suite.opened() == {"quiet_a": 1, "iter_a": 1}
    told = (
        "the quiet control is itself a spike: its baseline is 1.899 x the median, above the "
        "target 1.5"
    )
    result.stdout.fnmatch_lines([f"E  *{told}", f"a: {told}"])


def test_each_case_is_opened_once_over_two_workers(suite: Suite) -> None:
    for name in ("a", "b", "c"):
        suite.case(name)
    suite.run("-n", "2").assert_outcomes(passed=18)
    assert suite.opened() == {"iter_a": 1, "iter_b": 1, "iter_c": 1}


def test_the_count_would_see_a_case_that_is_opened_twice(suite: Suite) -> None:
    suite.case("a")
    joint = SUITE.replace("replay(mitigation)", "(_spike_sessions.close(), replay(mitigation))[1]")
    joint = joint.replace("mitigation, replay)", "mitigation, replay, _spike_sessions)")
    suite.pytester.makepyfile(test_spikes=joint)
    suite.run().assert_outcomes(passed=6)
    assert suite.opened() == {"iter_a": 6}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["plain", "two-workers"])
def test_the_real_engine_opens_each_case_once(suite: Suite, workers: tuple[str, ...]) -> None:
    suite.engine("fake_engine.log_openings()")
    for name in ("a", "b"):
        suite.case(name, "expected: {disable-routing-replay: fail}")
    result = suite.run(*workers, "-k", "reproduction or disable")
    result.assert_outcomes(passed=4)
    assert suite.opened() == {"iter_a": 1, "iter_b": 1}


def test_worse_than_expected_is_red_and_better_is_reported(suite: Suite) -> None:
    suite.case("a", "expected: {disable-routing-replay: fail, replay-r3-on-loss-tokens-only: fail}")
    result = suite.run()
    result.assert_outcomes(passed=5, failed=1)
    told = (
        "a / balance-negative-advantages: partial: norm 5 is 2.374 x the median 2.105911, above "
        "the target 1.5, but 40.8% under the compared norm 8.441921 (15% are worth recording); "
        "cosine to the unpatched gradient 0.980 (worse than expected: pass)"
    )
    result.stdout.fnmatch_lines(
        [
            f"E  *{told}*",
            "*= spike replay =*",
            "a: folded, float32 on cpu",
            "experiment * quiet * verdict",
            "baseline * reproduced",
            "balance-negative-advantages * partial (worse)",
            told,
            "a / replay-r3-on-loss-tokens-only: pass: * (better than expected: fail)",
        ]
    )


def test_the_summary_is_the_same_from_two_workers(suite: Suite) -> None:
    suite.case("a")
    plain, spread = (
        [line for line in suite.run(*how).outlines if re.match(r"[a-z]\S+  +\d", line)]
        for how in ((), ("-n", "2"))
    )
    assert len(plain) == 6
    assert plain == spread


def test_a_baseline_that_is_not_reproduced_turns_everything_red(suite: Suite) -> None:
    suite.engine("fake_engine.NORMS['baseline'] = 8.45\nfake_engine.install()")
    suite.case("a")
    result = suite.run()
    result.assert_outcomes(failed=6)
    result.stdout.fnmatch_lines(["*a / disable-routing-replay: not_reproduced: *"])


def test_no_case_is_a_skip_and_red_where_cases_are_required(suite: Suite) -> None:
    reason = f"no case in {suite.pytester.path / 'spike_cases'}"
    result = suite.run("-q")
    result.assert_outcomes(skipped=6)
    told = f"{reason}: 6 tests that ask for one were skipped. Name a directory of cases with *"
    result.stdout.fnmatch_lines(["*= spike replay =*", told])
    required = suite.run("--require-cases")
    required.assert_outcomes(errors=6)
    required.stdout.fnmatch_lines([f"*{reason}"])


def test_a_case_whose_snapshot_is_absent_is_told_with_its_path(suite: Suite) -> None:
    suite.case("a", snapshot=SNAPSHOT)
    gone = suite.pytester.path / "spike_cases" / "a" / "iter_a"
    gone.rename(gone.with_name("elsewhere"))
    result = suite.run("-k", "reproduction")
    result.assert_outcomes(skipped=1)
    told = (
        f"a: no directory {gone}: 1 test that asks for one was skipped. Copy the snapshot there, *"
    )
    result.stdout.fnmatch_lines(["*= spike replay =*", told])
    required = suite.run("-k", "reproduction", "--require-cases")
    required.assert_outcomes(errors=1)
    required.stdout.fnmatch_lines([f"*case.yaml: snapshot: found no directory {gone}, expected *"])


def test_cases_and_mitigations_of_another_repository(suite: Suite) -> None:
    suite.case("a")
    cases = suite.pytester.path / "spike_cases"
    cases.rename(suite.pytester.path / "elsewhere")
    own = suite.pytester.path / "own"
    own.mkdir()
    (own / "halve_clip.py").write_text(
        "from replay_lib.patch import mitigation, settings_patch\n"
        "@mitigation(slug='halve-clip', family='settings', summary='s', source='own')\n"
        "def halve_clip(high: float = 0.1):\n"
        "    return settings_patch(clip_ratio_high=high)\n"
    )
    result = suite.run("--spike-cases", "elsewhere", "--mitigations", "own", "-v", "-k", "halve")
    result.assert_outcomes(passed=1, deselected=6)
    result.stdout.fnmatch_lines(["*test_mitigation[[]a-halve-clip[]] PASSED*"])


def test_parameters_are_tried_where_a_case_expects_something_of_them(suite: Suite) -> None:
    label = "enable-token-mismatch-tis-max2:clip_max=1.5"
    suite.case("a", f"expected: {{'{label}': pass}}")
    suite.case("b")
    result = suite.run("-v", "-k", "clip_max")
    result.assert_outcomes(passed=1, deselected=13)
    result.stdout.fnmatch_lines([f"*test_mitigation[[]a-{label}[]] PASSED*"])


def test_an_expectation_of_an_unknown_method_is_one_red_test_of_its_name(suite: Suite) -> None:
    suite.case("a", ALL_AS_EXPECTED.replace("}", ", disable-routing-reply: fail}"))
    suite.case("b")
    result = suite.run("-v")
    result.assert_outcomes(passed=12, errors=1)
    file = suite.pytester.path / "spike_cases" / "a" / "case.yaml"
    told = f"{file}: expected: mitigation disable-routing-reply: not registered; did you mean *"
    result.stdout.fnmatch_lines(["*test_mitigation[[]a-disable-routing-reply[]] ERROR*"])
    result.stdout.fnmatch_lines([told])
    assert suite.opened() == {"iter_a": 1, "iter_b": 1}
    # a suite that asks for no such test is told all the same
    suite.run("-k", "reproduction").stdout.fnmatch_lines([told])


GPU_SUITE = """
import pytest

@pytest.mark.gpu
def test_gpu(case, replay):
    assert replay().device == "cuda"

@pytest.mark.multigpu
def test_multigpu(case, replay):
    assert replay().device == "cuda"

@pytest.mark.slow
def test_cpu(case, replay):
    assert replay().device == "cpu"
"""


def test_gpu_tests_skip_with_a_reason_and_fail_where_a_device_is_required(suite: Suite) -> None:
    suite.case("a")
    suite.pytester.makepyfile(test_spikes=GPU_SUITE)
    result = suite.run("-rs", "--strict-markers")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * a: it needs 1 NVIDIA device(s), 0 found",
            "SKIPPED * a: it needs 2 NVIDIA device(s), 0 found",
        ]
    )
    required = suite.run("--require-device")
    required.assert_outcomes(passed=1, errors=2)


def test_a_case_that_needs_more_than_there_is(suite: Suite) -> None:
    suite.case("a", "needs: {device: any, memory_gib: 1000000.0}")
    result = suite.run("-rs", "-k", "reproduction")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * a: it needs 1e+06 GiB of memory on cpu, * found"])


def test_other_fixtures_named_case_are_left_alone(suite: Suite) -> None:
    suite.case("a")
    suite.pytester.makepyfile(
        test_spikes="""
        import pytest

        @pytest.fixture
        def mitigation():
            return "mine"

        @pytest.mark.parametrize(("other", "case"), [(1, 2), (3, 4)])
        def test_mine(other, case, mitigation):
            assert case == other + 1
            assert mitigation == "mine"
        """
    )
    suite.run().assert_outcomes(passed=2)


def test_nothing_of_torch_is_imported_by_the_plugin(suite: Suite) -> None:
    suite.case("a")
    suite.pytester.makepyfile(
        test_spikes="""
        import sys

        def test_parent_stays_light(case, mitigation, replay):
            replay(mitigation)
            assert "torch" not in sys.modules
        """
    )
    suite.run().assert_outcomes(passed=5)
