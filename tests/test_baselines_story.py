"""The life of a baseline, told as a user meets it: every run is a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugin_suite import Suite, make_suite

ENVIRONMENT = "cpu-float32-torchnone-megatronunknown"
CHANGED = "fake_engine.NORMS['disable-routing-replay'] = 8.4\nfake_engine.install()"
CHANGED_NORM = '"norm": 8.4,'
ORPHAN = '  "no-such-method": {"norm": 3.0, "verdict": "fail", "since": "2025-01-01"},\n'


def document(suite: Suite, case: str = "a") -> Path:
    return suite.pytester.path / "spike_cases" / case / "baselines" / f"{ENVIRONMENT}.json"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return make_suite(pytester, monkeypatch)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["plain", "two-workers"])
def test_the_life_of_a_baseline(suite: Suite, workers: tuple[str, ...]) -> None:
    suite.case("a", quiet=True)
    file = document(suite)

    created = suite.run(*workers, "--update-baselines")
    created.assert_outcomes(passed=6)
    assert created.ret == pytest.ExitCode.TESTS_FAILED
    created.stdout.fnmatch_lines(
        [
            f"a: wrote {file}",
            "a: 6 new: balance-negative-advantages, baseline, disable-routing-replay, *",
            "baselines were written, so this run fails; the next one compares with them",
        ]
    )
    first = file.read_text()

    same = suite.run(*workers)
    same.assert_outcomes(passed=6)
    assert same.ret == pytest.ExitCode.OK
    same.stdout.no_fnmatch_line("*baseline for*")

    suite.engine(CHANGED)
    drifted = suite.run(*workers)
    drifted.assert_outcomes(passed=5, failed=1)
    drifted.stdout.fnmatch_lines(
        [
            "a / disable-routing-replay: fail: *; the norm is 8.4, its baseline 8 "
            "(+0.05, 2e-05 is the noise of float32 on CPUs)"
        ]
    )
    assert file.read_text() == first

    updated = suite.run(*workers, "--update-baselines")
    updated.assert_outcomes(passed=6)
    assert updated.ret == pytest.ExitCode.TESTS_FAILED
    updated.stdout.fnmatch_lines(["a: disable-routing-replay: norm 8 -> 8.4 (+0.05)"])
    old, new = first.splitlines(), file.read_text().splitlines()
    changed = [line for line in new if line not in old]
    assert len(changed) == 1 and changed[0].startswith('  "disable-routing-replay": {"norm": 8.4, ')
    (past,) = json.loads(file.read_text())["methods"]["disable-routing-replay"]["history"]
    assert (past["norm"], past["verdict"], past["quiet"]) == (8.0, "fail", 2.1)

    text = file.read_text().replace('  "replay', ORPHAN + '  "replay', 1)
    file.write_text(text)
    full = suite.run(*workers)
    full.assert_outcomes(passed=6)
    assert full.ret == pytest.ExitCode.TESTS_FAILED
    full.stdout.fnmatch_lines([f"{file}: no-such-method: a baseline without a method: *"])
    assert file.read_text() == text


def test_what_a_run_does_not_cover_is_left_alone(suite: Suite) -> None:
    suite.case("a")
    unknown = suite.run()  # an environment without baselines: verdicts alone
    unknown.assert_outcomes(passed=6)
    assert unknown.ret == pytest.ExitCode.OK and not document(suite).parent.exists()
    assert unknown.stdout.str().count("no baseline for") == 1
    told = "no baseline for float32 on cpu, torch none, Megatron-Core unknown: a (verdicts *"
    unknown.stdout.fnmatch_lines([told])

    suite.run("--update-baselines")
    text = document(suite).read_text().replace('  "replay', ORPHAN + '  "replay', 1)
    document(suite).write_text(text)
    gone = document(suite, "gone")
    gone.parent.mkdir(parents=True)
    gone.write_text("{}")
    part = suite.run("-k", "disable or reproduction")
    assert part.ret == pytest.ExitCode.OK
    part.stdout.no_fnmatch_line("*without a method*")
    full = suite.run("--update-baselines")
    assert full.ret == pytest.ExitCode.TESTS_FAILED
    full.stdout.fnmatch_lines(["a: no-such-method: removed, there is no such method"])
    left = suite.run("--update-baselines")  # nothing to write
    assert left.ret == pytest.ExitCode.TESTS_FAILED
    left.stdout.fnmatch_lines([f"{gone}: baselines without a case; *"])


def test_a_document_that_is_none_is_told_by_its_name(suite: Suite) -> None:
    suite.case("a")
    document(suite).parent.mkdir()
    document(suite).write_text('{"schema": 1}')
    result = suite.run("-k", "reproduction")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{document(suite)}: case_digest: found 5 faults, *"])


def test_a_part_of_the_ranks_is_compared_with_its_own(suite: Suite) -> None:
    suite.case("a")
    suite.run("--update-baselines").assert_outcomes(passed=6)
    suite.engine(CHANGED)
    suite.run("--dp-ranks=0", "--update-baselines").assert_outcomes(passed=6)
    part = document(suite).with_name(f"{ENVIRONMENT}-ranks0-of-2.json")
    assert CHANGED_NORM in part.read_text() and CHANGED_NORM not in document(suite).read_text()
    same = suite.run("--dp-ranks=0")  # what all ranks gave, and should give, is another matter
    same.assert_outcomes(passed=6)
    same.stdout.no_fnmatch_line("*baseline for*")
    same.stdout.no_fnmatch_line("*not listed in case.yaml*")
