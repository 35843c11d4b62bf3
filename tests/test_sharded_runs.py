"""Shards of the suite and how they become one run again, as a user meets it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plugin_suite import SUITE, Suite, make_suite
from typer.testing import CliRunner

from replay_lib import pytest_plugin
from replay_lib.cli.commands import app
from replay_lib.record.baselines import Document, file_of, rendered
from replay_lib.record.environment import Environment
from replay_lib.record.shards import shard_of_file

CASES = {  # one as expected, one better, one worse, one that cannot be replayed
    "a": "expected: {disable-routing-replay: fail, balance-negative-advantages: partial}",
    "b": "expected: {disable-routing-replay: fail, balance-negative-advantages: fail}",
    "c": "expected: {balance-negative-advantages: partial}",
    "d": "expected: {disable-routing-replay: fail, balance-negative-advantages: partial}",
}
OTHER = """
import os, signal

def test_of_no_case():
    if os.environ.get("KILLED_HERE"):
        os.kill(os.getpid(), signal.SIGKILL)
"""
AT_ONCE = "from replay_lib import pytest_run\npytest_run.FLUSH_SECONDS = 0.0\nfake_engine.install()"
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


def test_two_shards_are_the_report_of_one_run(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, expected in CASES.items():
        suite.case(name, expected, quiet=name == "b")
    suite.pytester.makepyfile(test_spikes=SUITE, test_zz=OTHER)
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

    one = shard_of_file("test_zz.py", 2)
    absent = merged(path / "part", path / f"shard{3 - one}")[1]
    assert f"shard {one}/2 is absent" in absent

    # killed in its last test, then run again into its folder
    shutil.rmtree(path / f"shard{one}")
    suite.engine(AT_ONCE)
    again = (f"--shard={one}/2", f"--spike-results=shard{one}")
    monkeypatch.setenv("KILLED_HERE", "1")
    assert suite.run(*again).ret == -signal.SIGKILL
    monkeypatch.delenv("KILLED_HERE")
    code, output = merged(path / "merged", path / "shard1", path / "shard2")
    left = "not run: test_zz.py::test_of_no_case\n"
    assert (code, output.count("not run: ")) == (1, 1) and output.endswith(left)
    suite.run(*again)
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


def test_side_by_side_the_dearest_case_starts_first(tmp_path: Path) -> None:
    environment = Environment.of("cpu", "float32", {"torch": "2"})
    for name, seconds in {"a": 1.0, "b": 9.0, "c": 2.0}.items():
        file = tmp_path / name / "case.yaml"
        file_of(file, environment).parent.mkdir(parents=True)
        file.write_text("schema: 1\nsnapshot: iter_0000001\n")
        document = Document(
            case_digest="", environment=environment, deterministic=True, seconds=seconds, methods={}
        )
        file_of(file, environment).write_text(rendered(document))
    options: dict[str, Any] = {"--spike-cases": tmp_path, "--mitigations": []}

    def order(**fields: Any) -> list[str]:
        config: Any = SimpleNamespace(stash=pytest.Stash(), getoption=options.get, **fields)
        return [param.id for param in pytest_plugin._case_params(config)]

    assert order() == ["a", "b", "c"]
    assert order(workerinput={}) == ["b", "c", "a"]
