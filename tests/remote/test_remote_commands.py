"""``--ssh`` on replay, sweep and guard: what is printed, kept and returned is a local run's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from cli_ran import Ran
from loopback import Loopback

from replay_lib import run
from replay_lib.record import ledger
from replay_lib.record.results_file import read_results
from replay_lib.record.task import Task

CASE = Path(__file__).parents[2] / "spike_cases" / "axrl-plain-step85"
METHODS = ["disable-routing-replay", "balance-negative-advantages"]
ASKED = [word for method in METHODS for word in ("-m", method)]
#: What two runs of one command never have in common, or two machines.
APART = {"at", "host", "pid", "run", "seconds", "timestamp", "versions", "command", "output"}


@pytest.fixture
def spike_replay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Ran(capsys, *arguments)


def alike(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: alike(inside) for name, inside in value.items() if name not in APART}
    if isinstance(value, float):  # threads, of which a node has others, add up in another order
        return float(f"{value:.12g}")
    return [alike(inside) for inside in value] if isinstance(value, list) else value


def lines(job: str) -> list[Any]:
    return [alike(event.model_dump(mode="json")) for event in ledger.read(Task(job))]


def test_ledger_json_and_exit_code_are_those_of_a_local_run(
    spike_replay: Any, node: Loopback
) -> None:
    here = spike_replay("replay", CASE, *ASKED, "--task=here", "--json")
    there = spike_replay("replay", CASE, *ASKED, "--task=there", "--json", *node.options)
    assert (there.code, alike(there.document)) == (here.code, alike(here.document))
    assert lines("there") == lines("here")
    kinds = [event.kind for event in ledger.read(Task("there"))]
    assert kinds == ["started", "result", "result", "result", "ended"]
    (output,) = Path("tmp/spike-replay/there").iterdir()
    assert {file.name for file in output.iterdir()} >= {
        "results.jsonl",
        "printed.txt",
        "node.log",
        "node-events.jsonl",
    }
    assert node.runs == []


def test_a_command_that_was_cut_is_completed_by_itself(spike_replay: Any, node: Loopback) -> None:
    node.set(FAKE_SECONDS=0.4)
    asked = ("replay", CASE, *ASKED, "--task=job", *node.options)
    real = ledger.append

    def cut(*arguments: Any, **data: Any) -> Any:
        if arguments[1] == "result":
            node.cut()
        return real(*arguments, **data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ledger, "append", cut)
        first = spike_replay(*asked)
    assert first.code == 6
    assert "repeat the command" in first.err
    second = spike_replay(*asked)
    assert second.code == 0
    events = ledger.read(Task("job"))
    names = [e.data["result"]["experiment"] for e in events if e.kind == "result"]
    assert names == ["baseline", *METHODS]
    assert [e.kind for e in events if e.kind in ("started", "failure", "ended")] == [
        *("started", "failure", "ended"),
        *("started", "ended"),
    ]
    assert sorted(node.ran()) == sorted(["baseline", "baseline", *METHODS])
    assert all(name in second.out for name in METHODS)


@pytest.mark.slow
def test_a_search_over_pairs_is_the_local_one(spike_replay: Any, node: Loopback) -> None:
    asked = ("sweep", CASE, *METHODS, "use-tis-loss", "--combine=2", "--json")
    here = spike_replay(*asked, "--task=here", "--results=here.jsonl")
    there = spike_replay(*asked, "--task=there", "--results=there.jsonl", *node.options)
    assert (there.code, alike(there.document)) == (here.code, alike(here.document))
    assert len(here.document["sweep"]["pairs"]) > 0
    assert lines("there") == lines("here")
    told = [[alike(r.as_json()) for r in read_results(f"{n}.jsonl")] for n in ("here", "there")]
    assert told[0] == told[1]


@pytest.mark.slow
def test_a_plain_sweep_is_the_local_one(spike_replay: Any, node: Loopback) -> None:
    here = spike_replay("sweep", CASE, "--json", "--task=here")
    there = spike_replay("sweep", CASE, "--json", "--task=there", *node.options)
    assert (there.code, alike(there.document)) == (here.code, alike(here.document))
    assert lines("there") == lines("here")
    assert len(lines("there")) > 40


@pytest.mark.slow
def test_a_guard_of_ones_own_loss_is_the_local_one(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    node: Loopback,
    tmp_path: Path,
) -> None:
    """With the engine itself, and a trainer that imports a module of the user beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses_of_mine.py").write_text(
        "import scale_of_mine\n"
        "from replay_lib.trainers import token_loss\n\n\n"
        "class Plain:\n"
        '    refuses = ("settings", "token_weights")\n\n'
        "    def loss(self, settings, rows, log_prob_BT, entropy_BT, token_weight_BT=None):\n"
        "        term = -scale_of_mine.SCALE * rows.advantage * log_prob_BT * rows.loss_mask\n"
        "        tokens = rows.loss_mask.sum()\n"
        "        return token_loss(term.sum() / tokens.clamp(min=1), tokens, rows)\n\n\n"
        "def make(saved):\n    return Plain()\n"
    )
    (tmp_path / "scale_of_mine.py").write_text("SCALE = 1.25\n")
    asked = ("guard", CASE, "--trainer=losses_of_mine:make", "--against=grpo", "--json", "-m")
    asked = (*asked, "disable-routing-replay")
    here = Ran(capsys, *asked, "--task=here")
    place = [f"--ssh={node.ssh}", f"--remote-dir={node.directory}"]
    there = Ran(capsys, *asked, "--task=there", *place, f"--remote-python={sys.executable}")
    assert (there.code, alike(there.document)) == (here.code, alike(here.document))
    assert here.code == 1  # another loss is another gradient
    monkeypatch.setattr(sys.modules[__name__], "APART", APART | {"notes"})  # one has its file
    assert lines("there") == lines("here")
    under = {line["data"].get("under") for line in lines("there")}
    assert under == {None, "grpo", "losses_of_mine:make"}


@pytest.mark.parametrize("option", ["--remote-python=python3", "--remote-dir=/x"])
def test_options_of_a_node_without_one(spike_replay: Any, option: str) -> None:
    ran = spike_replay("replay", CASE, option, "--json")
    assert ran.code == 2
    assert "found no --ssh" in ran.document["error"]["message"]


def test_a_node_of_several_is_refused(spike_replay: Any) -> None:
    several = ("--nnodes=2", "--rdzv-endpoint=127.0.0.1:29500", "--layout=dp=2")
    ran = spike_replay("replay", CASE, *several, "--ssh=ssh host", "--json")
    assert ran.code == 2
    assert "start it on one of them" in ran.document["error"]["message"]


def test_a_node_that_is_not_there_is_one_error(spike_replay: Any) -> None:
    ran = spike_replay("replay", CASE, "--ssh=sh -c 'echo nobody >&2; exit 255'", "--json")
    assert ran.code == 6
    assert ran.document["error"]["code"] == "node"
    assert "no connection: nobody" in ran.document["error"]["message"]
