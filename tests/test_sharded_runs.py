"""Shards of the suite and how they become one run again, as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from plugin_suite import SUITE, Suite, make_suite
from typer.testing import CliRunner

from replay_lib.cli.commands import app

CASES = {  # one as expected, one better, one worse, one that cannot be replayed
    "a": "expected: {disable-routing-replay: fail, balance-negative-advantages: partial}",
    "b": "expected: {disable-routing-replay: fail, balance-negative-advantages: fail}",
    "c": "expected: {balance-negative-advantages: partial}",
    "d": "expected: {disable-routing-replay: fail, balance-negative-advantages: partial}",
}
OTHER = "def test_of_no_case():\n    pass\n"
#: Names and times that differ from run to run.
LOOSE = {"seconds": 0.0, "timestamp": ""}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return make_suite(pytester, monkeypatch)


def results(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) | LOOSE for line in lines]


def merged(out: Path, *folders: Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["merge", str(out), *map(str, folders)])
    return found.exit_code, found.output


def test_two_shards_are_the_report_of_one_run(suite: Suite) -> None:
    for name, expected in CASES.items():
        suite.case(name, expected, quiet=name == "b")
    suite.pytester.makepyfile(test_spikes=SUITE, test_other=OTHER)
    path = suite.pytester.path
    suite.run("--spike-results=whole")
    ran = 0
    for index, workers in ((1, ()), (2, ("-n", "2"))):
        shard = suite.run(f"--shard={index}/2", f"--spike-results=shard{index}", *workers)
        ran += sum(shard.parseoutcomes().get(word, 0) for word in ("passed", "failed"))
    assert ran == 25  # every test in exactly one shard
    code, output = merged(path / "merged", path / "shard1", path / "shard2")
    assert code == 1  # a verdict of c is worse
    assert (path / "merged/report.txt").read_text() == (path / "whole/report.txt").read_text()
    assert output == (path / "whole/report.txt").read_text()
    assert re.match(r"24 passed, 1 failed\n", output)
    assert "failed: test_spikes.py::test_mitigation[c-disable-routing-replay]: " in output
    assert results(path / "merged") == results(path / "whole")
    assert (path / "merged/tests.jsonl").read_text() == (path / "whole/tests.jsonl").read_text()

    # only one of them, then a killed one that is run again into its folder
    assert "shard 2/2 is absent" in merged(path / "part", path / "shard1")[1]
    lines = (path / "shard1/tests.jsonl").read_text().splitlines()
    (path / "shard1/tests.jsonl").write_text("".join(f"{line}\n" for line in lines[:3]))
    code, output = merged(path / "merged", path / "shard1", path / "shard2")
    assert (code, output.count("not run: ")) == (1, len(lines) - 3)
    suite.run("--shard=1/2", "--spike-results=shard1")
    output = merged(path / "merged", path / "shard1", path / "shard2")[1]
    assert output == (path / "whole/report.txt").read_text()


def test_a_shard_without_tests_is_green_where_others_have_them(suite: Suite) -> None:
    suite.case("a")
    for workers in ((), ("-n", "2")):
        second = suite.run("--shard=2/2", *workers)
        assert second.ret == pytest.ExitCode.OK
    nothing = suite.run("--shard=2/2", "-k", "nothing")
    assert nothing.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    refused = suite.run("--shard=3/2")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: shard: found '3/2', expected i/n with 1 <= i <= n, *"])
