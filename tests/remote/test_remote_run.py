"""A run on a node, over a real ssh server on the loopback address; the engine is the fake one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from loopback import Loopback

from replay_lib import run
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import NodeError
from replay_lib.record.refusal import Refusal
from replay_lib.record.result import Result
from replay_lib.remote import replaying
from replay_lib.remote.replaying import Remote
from replay_lib.run import Replayed, ReplayOptions, Step

EMBEDDED = Path(__file__).parents[2] / "spike_cases" / "axrl-plain-step85"
METHODS = ["disable-routing-replay", "balance-negative-advantages", "use-tis-loss"]
EXPERIMENTS = [Experiment.parse(name) for name in METHODS]
#: What may differ between two machines, or two times.
ELSEWHERE = ("timestamp", "seconds", "versions")


class Kept:
    """Everything that was kept, and told, in order; ``at`` is called with each result."""

    def __init__(self, at: Callable[[Result], None] = lambda _one: None) -> None:
        self.results: list[Result] = []
        self.refused: list[Refusal] = []
        self.steps: list[Step] = []
        self._at = at

    def keep(self, one: Result | Refusal) -> None:
        if isinstance(one, Refusal):
            self.refused.append(one)
            return
        self.results.append(one)
        self._at(one)

    @property
    def names(self) -> list[str]:
        return [result.experiment for result in self.results]


def remote_of(node: Loopback, **more: Any) -> Remote:
    return Remote(ssh=node.ssh, python=str(node.python), directory=str(node.directory), **more)


def there(node: Loopback, kept: Kept, case: Case | None = None, **more: Any) -> Replayed:
    return replaying.replay(
        remote_of(node, **more),
        case or Case.open(EMBEDDED),
        EXPERIMENTS,
        ReplayOptions(),
        tell=kept.steps.append,
        keep=kept.keep,
    )


def keys(kept: Kept) -> frozenset[str]:
    return frozenset(replaying.key_of(result.as_json()) for result in kept.results)


def plain(results: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.as_json().items() if k not in ELSEWHERE} for r in results]


def test_a_remote_replay_gives_what_a_local_one_gives(
    node: Loopback, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    case = Case.open(EMBEDDED)
    here = Kept()
    local = run.replay_case(case, EXPERIMENTS, ReplayOptions(), here.steps.append, keep=here.keep)

    kept, output = Kept(), tmp_path / "output"
    output.mkdir()
    remote = there(node, kept, output=output)

    assert plain(remote.results) == plain(local.results)
    assert plain(kept.results) == plain(here.results)
    assert remote.exit_code == local.exit_code
    # progress is the local one's, after what prepared the node
    assert [s.what for s in kept.steps][-len(here.steps) :] == [s.what for s in here.steps]
    assert node.runs == []
    assert "value" in (output / "node-events.jsonl").read_text().splitlines()[-1][:20]
    assert (output / "node.log").exists()

    copied = {file: file.stat().st_mtime_ns for file in node.directory.rglob("*")}
    again = Kept()
    there(node, again)
    assert not any("copying" in step.what for step in again.steps)
    files = [file for file in copied if file.is_file()]
    assert len(files) > 100
    assert all(file.stat().st_mtime_ns == copied[file] for file in files)
    assert len(node.ran()) == 2 * 5  # the baseline twice, and three methods


@pytest.mark.slow
def test_a_cut_connection_and_the_same_command_again_complete_the_run(node: Loopback) -> None:
    node.set(FAKE_SECONDS=0.4)
    first = Kept(lambda one: node.cut() if len(first.results) == 2 else None)
    with pytest.raises(NodeError, match="the connection was lost") as lost:
        there(node, first)
    assert "repeat the command" in str(lost.value)
    assert 2 <= len(first.results) < 4
    assert len(node.runs) == 1

    second = Kept()
    whole = there(node, second, earlier=keys(first))

    names = ["baseline", *METHODS]
    assert [r.experiment for r in whole.results] == names
    # each was kept once, over both commands, and replayed once (the baseline twice, as always)
    assert first.names + second.names == names
    assert sorted(node.ran()) == sorted([*names, "baseline"])
    assert node.runs == []


@pytest.mark.slow
def test_a_run_that_ended_while_nobody_listened_is_brought_back(node: Loopback) -> None:
    node.set(FAKE_SECONDS=0.3)
    first = Kept(lambda _one: node.cut())
    with pytest.raises(NodeError):
        there(node, first)
    (directory,) = node.runs
    _until(lambda: '"event": "value"' in (directory / "events.jsonl").read_text())

    second = Kept()
    assert len(there(node, second).results) == 4
    assert len(node.ran()) == 5
    assert node.runs == []


@pytest.mark.slow
def test_what_a_killed_run_has_ended_is_not_replayed_again(node: Loopback) -> None:
    node.set(FAKE_SECONDS=0.3)

    def kill(_one: Result) -> None:
        if len(first.results) == 2:
            (directory,) = node.runs
            os.kill(int((directory / "lock").read_text().split()[-1]), signal.SIGKILL)

    first = Kept(kill)
    with pytest.raises(NodeError, match="the run died there"):
        there(node, first)
    ended = node.ran()

    second = Kept()
    whole = there(node, second, earlier=keys(first))
    assert [r.experiment for r in whole.results] == ["baseline", *METHODS]
    assert first.names + second.names == ["baseline", *METHODS]
    # a new session has its own baselines; of the methods only the rest
    later = node.ran()[len(ended) :]
    assert [name for name in later if name != "baseline"] == METHODS[len(first.results) - 1 :]
    assert node.runs == []


@pytest.mark.slow
def test_an_interrupt_here_ends_the_run_there(node: Loopback) -> None:
    node.set(FAKE_SECONDS=3)

    def interrupt(_one: Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        there(node, Kept(interrupt))
    assert node.runs == []
    ran = len(node.ran())
    time.sleep(3.5)
    assert len(node.ran()) == ran < 5
    assert any("close" in line for line in node.log.read_text().splitlines())


@pytest.mark.slow
def test_two_at_once_share_one_run(node: Loopback) -> None:
    node.set(FAKE_SECONDS=0.2)
    kept = [Kept(), Kept()]
    threads = [threading.Thread(target=there, args=(node, one)) for one in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept[0].names == kept[1].names == ["baseline", *METHODS]
    assert len(node.ran()) == 5


@pytest.mark.slow
def test_an_error_there_is_the_same_error_here(node: Loopback, tmp_path: Path) -> None:
    node.set(FAKE_RAISES="the 3rd rank is gone: <it>")
    from replay_lib.errors import EngineError

    with pytest.raises(EngineError, match="the 3rd rank is gone: <it>"):
        there(node, Kept(), output=tmp_path)
    assert node.runs == []  # the same command tries again
    node.set()
    assert len(there(node, Kept()).results) == 4


@pytest.mark.slow
def test_odd_names_travel(node: Loopback, tmp_path: Path) -> None:
    odd = tmp_path / "a 'b' \"c\" $(touch pwned) `x`\n;rm -rf *:~ \\" / "iter_0000085"
    shutil.copytree(EMBEDDED / "snapshot" / "iter_0000085", odd)
    (odd / "-e 'sh'\n$HOME \"*\\ \udc80.txt").write_text("as it is")
    methods = tmp_path / "my 'methods'\n$x"
    methods.mkdir()
    (methods / "halve_everything.py").write_text(
        "from replay_lib.patch import batch_patch, mitigation\n\n\n"
        '@mitigation(slug="halve-everything", family="mine", summary="-", source="-")\n'
        "def halve():\n"
        "    return batch_patch(lambda batch: batch.replace(advantage=batch.advantage / 2))\n"
    )
    kept = Kept()
    replayed = replaying.replay(
        remote_of(node),
        Case.open(odd),
        [Experiment.parse("halve-everything")],
        ReplayOptions(mitigations=(methods,)),
        tell=kept.steps.append,
        keep=kept.keep,
    )
    assert [r.experiment for r in replayed.results] == ["baseline", "halve-everything"]
    (copy,) = node.directory.glob("cases/*/snapshot/iter_0000085")
    assert {f.name: f.read_bytes() for f in copy.iterdir()} == {
        f.name: f.read_bytes() for f in odd.iterdir()
    }


def _until(true: Callable[[], bool]) -> None:
    for _ in range(200):
        if true():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen within 10 s")
