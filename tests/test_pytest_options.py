"""Options of the pytest plugin: they reach the engine, or are refused as a wrong call."""

from __future__ import annotations

import pytest
from plugin_suite import Suite, make_suite


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return make_suite(pytester, monkeypatch)


def test_a_directory_without_cases_is_a_usage_error_that_names_the_option(suite: Suite) -> None:
    gone, bare = suite.pytester.path / "nope", suite.pytester.mkdir("bare")
    expected = "expected a directory that holds cases, as DIR/NAME/case.yaml"
    suite.case("a", "expected: [1]")
    broken = suite.pytester.path / "spike_cases"
    told = {
        gone: f"found no directory {gone}, {expected}",
        bare: f"found none in {bare}, {expected}",
        broken: f"{broken}/a/case.yaml: expected: found *1*, expected Input should be *",
    }
    for directory, text in told.items():
        result = suite.run(f"--spike-cases={directory}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --spike-cases: {text}"])


def test_trainer_and_backend_reach_the_engine(suite: Suite) -> None:
    suite.case("a")
    suite.pytester.makepyfile(
        test_spikes="""
        def test_whose(case, replay):
            found = replay()
            assert (found.trainer, found.backend) == ("test_spikes:make", "native")

        def make(saved):
            return saved  # importable because the test was found
        """
    )
    suite.run("--trainer", "test_spikes:make").assert_outcomes(passed=1)
    suite.run("--backend", "axrl").assert_outcomes(failed=1)
    refused = suite.run("--backend", "axrl", "--trainer", "test_spikes:make")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: backend axrl: it cannot honour --trainer: *"])


def test_the_layout_reaches_the_engine(suite: Suite) -> None:
    suite.case("a")
    suite.pytester.makepyfile(
        test_spikes="""
        def test_where(case, replay):
            assert replay().layout == {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 1}
        """
    )
    suite.run("--layout", "tp=2").assert_outcomes(passed=1)
    suite.run().assert_outcomes(failed=1)
    refused = suite.run("--layout", "vpp=2")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: layout 'vpp=2': *"])


def test_repeats_reach_the_session_the_result_and_the_summary(suite: Suite) -> None:
    suite.case("a")
    suite.pytester.makepyfile(
        test_spikes="""
        def test_count(case, replay):
            assert (replay().repeats, replay().repeat_spread) == (4, 0.0)
        """
    )
    result = suite.run("--repeats", "4")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["a: folded, float32 on cpu; 4 baselines, spread of their norm 0"])
    assert sum("run baseline" in line for line in suite.log.read_text().splitlines()) == 4
    refused = suite.run("--repeats", "1")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: --repeats: found 1, expected 2 or more: *"])


def test_the_machines_of_a_run_reach_the_engine(suite: Suite) -> None:
    suite.case("a")
    suite.pytester.makepyfile(
        test_spikes="""
        from replay_lib.engine.nodes import Nodes
        from replay_lib.pytest_options import options_of

        def test_where(case, replay, request):
            made = Nodes(number=2, host="10.0.0.1", port=29400, timeout_s=5.0)
            assert options_of(request.config).nodes == made
        """
    )
    there = ("--nnodes", "2", "--rdzv-endpoint", "10.0.0.1:29400", "--join-timeout", "5")
    suite.run(*there).assert_outcomes(passed=1)
    for more, words in (
        (("--nnodes", "2"), "--nnodes: found without --rdzv-endpoint, expected both*"),
        ((*there, "-n", "2"), "--nnodes: found -n beside it, expected one process: leave -n out"),
    ):
        refused = suite.run(*more)
        assert refused.ret == pytest.ExitCode.USAGE_ERROR
        refused.stderr.fnmatch_lines([f"ERROR: {words}"])
