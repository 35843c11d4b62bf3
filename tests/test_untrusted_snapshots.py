"""A pickle that would run a command, in each file that can hold one, under the commands."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

ROOT = Path(__file__).parents[1]
INSTALLED = any(point.name == "spike_replay" for point in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "replay_lib.pytest_plugin")
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def snapshot(tmp_path) -> Path:
    return Path(shutil.copytree(PLAIN, tmp_path / PLAIN.name))


def poison(snapshot: Path, name: str, marker: Path) -> None:
    """Put the payload into one file of the snapshot."""
    if name == ".metadata":
        (snapshot / name).write_bytes(pickle.dumps(Evil(marker)))
    elif name == "_extra_state":
        _poison_object(snapshot, marker)
    else:
        torch.save([Evil(marker)], snapshot / name)


def _poison_object(snapshot: Path, marker: Path) -> None:
    index = FileSystemReader(snapshot).read_metadata()
    key = next(k for k in index.state_dict_metadata if "_extra_state" in k)
    stored = next(v for i, v in index.storage_data.items() if i.fqn == key)
    payload = io.BytesIO()
    torch.save([Evil(marker)], payload)
    file = snapshot / stored.relative_path
    stored.offset, stored.length = file.stat().st_size, len(payload.getvalue())
    with file.open("ab") as stream:
        stream.write(payload.getvalue())
    (snapshot / ".metadata").write_bytes(pickle.dumps(index))


def call(*arguments: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "replay_lib.cli", *arguments, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return ended.returncode, json.loads(ended.stdout)


def test_the_payload_works(marker):
    """The control: without our reader the marker appears."""
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists()


READ = ("batch_rank1.pt", "routing_payload_rank0.pt", "trainer.pt", ".metadata")
NEVER_OPENED = ("common.pt", "train_state.pt", "grad_info_rank0.pt", "_extra_state")


@pytest.mark.parametrize("name", READ)
def test_what_a_replay_reads_is_refused_by_name(snapshot, marker, name):
    poison(snapshot, name, marker)
    call("show", str(snapshot))
    code, document = call("replay", str(snapshot), "--device", "cpu")
    assert not marker.exists()
    assert code == 3 and document["error"]["code"] == "snapshot_unsafe"
    assert name in document["error"]["message"] and "Nothing of it was run" in str(document)


def test_what_a_replay_does_not_need_is_never_opened(snapshot, marker):
    for name in NEVER_OPENED:
        poison(snapshot, name, marker)
    call("show", str(snapshot))
    code, document = call("sweep", str(snapshot), "disable-routing-replay", "--device", "cpu")
    assert not marker.exists()
    assert [r["verdict"] for r in document["results"]] == ["reproduced", "fail"]
    assert (code, document["exit_code"]) == (1, 1)  # the method fails on a bare snapshot


def test_a_case_with_such_a_snapshot_is_red_in_pytest(snapshot, marker, pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    poison(snapshot, "batch_rank0.pt", marker)
    case = pytester.path / "cases" / "evil"
    case.mkdir(parents=True)
    snapshot.rename(case / snapshot.name)
    (case / "case.yaml").write_text(
        f"schema: 1\nsnapshot: {snapshot.name}\nexpected: {{disable-routing-replay: fail}}\n"
    )
    pytester.makepyfile("def test_mitigation(replay, mitigation): replay(mitigation)")
    result = pytester.runpytest_subprocess(*PLUGIN, "--spike-cases", "cases", "--device", "cpu")
    assert result.ret == 1
    assert not marker.exists()
    result.stdout.fnmatch_lines(["evil / *batch_rank0.pt: found a pickle that asks for *"])
