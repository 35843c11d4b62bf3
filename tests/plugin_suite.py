"""A user's repository for tests of the pytest plugin: cases, a test file, and a way to run it."""

from __future__ import annotations

import os
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import fake_engine
import pytest

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "spike_cases" / "axrl-plain-step85" / "snapshot" / "iter_0000085"
INSTALLED = any(point.name == "spike_replay" for point in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "replay_lib.pytest_plugin")

SUITE = """
def test_reproduction(case, replay):
    assert not replay().red

def test_mitigation(case, mitigation, replay):
    result = replay(mitigation)
    assert not result.red, result.explain()
"""
ALL_AS_EXPECTED = "expected: {disable-routing-replay: fail, balance-negative-advantages: partial}"


class Suite:
    """A repository of a user: cases, a test file, and a way to run it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.log = pytester.path / "engine.log"
        pytester.makepyfile(test_spikes=SUITE)
        self.engine("fake_engine.install()")

    def engine(self, install: str) -> None:
        few = f"fake_engine.only_recorded_methods(Path({str(self.pytester.path / 'methods')!r}))"
        self.pytester.makeconftest(
            f"from pathlib import Path\nimport fake_engine\n{few}\n{install}\n"
        )

    def case(
        self,
        name: str,
        more: str = ALL_AS_EXPECTED,
        snapshot: Path = SNAPSHOT,
        quiet: bool = False,
        quiet_norm: float = 2.0,
    ) -> None:
        directory = self.pytester.path / "spike_cases" / name
        directory.mkdir(parents=True)
        # one snapshot a case by name, so that the log tells them apart; the files are shared
        (directory / f"iter_{name}").mkdir()
        for file in snapshot.iterdir():
            (directory / f"iter_{name}" / file.name).symlink_to(file)
        if quiet:
            fake_engine.quiet_snapshot(directory / f"quiet_{name}", snapshot, quiet_norm)
            more = f"quiet: quiet_{name}\n{more}"
        (directory / "case.yaml").write_text(f"schema: 1\nsnapshot: iter_{name}\n{more}\n")

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_subprocess(*PLUGIN, "-W", "error", *arguments)

    def opened(self) -> Counter[str]:
        """How often each snapshot was opened, over all processes."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Counter(Path(line.split()[2]).name for line in lines if line.split()[1] == "open")


def make_suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """An empty one without devices, in which the fake engine logs what it is asked for."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(fake_engine.LOG, str(pytester.path / "engine.log"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Suite(pytester)
