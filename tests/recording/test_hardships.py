"""Killed at any point, ranks that do not agree, a full disk: training and old snapshots survive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_job import KEYS, batch_of, new_recorder, spike

from replay_lib.errors import UsageError
from replay_lib.recorder import Event
from replay_lib.recording import job as job_module
from replay_lib.snapshot import open_snapshot, read_tensors

pytestmark = pytest.mark.xdist_group("recording-hardships")

HERE = Path(__file__).parent
OLD = ["iter_0000011", "iter_0000012", "iter_0000013"]
BOTH = [*OLD, "iter_0000014"]
NEW = BOTH[1:]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    program = [sys.executable, "-W", "ignore", str(HERE / "hardships.py")]
    done = subprocess.run(
        [*program, str(tmp_path_factory.mktemp("hardships"))],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_at_any_of_fifty_points_leaves_the_old_snapshots_or_the_new(told):
    trials = told["killed"]
    assert len(trials) == 50
    assert [trial["wrong"] for trial in trials] == [[]] * 50
    for trial in trials:
        seen = [name for name in trial["left"] if not name.startswith(".")]
        assert seen in (OLD, BOTH, NEW)  # both: named, and the oldest not yet rotated
        assert trial["kept"] == (OLD if seen == OLD else NEW)
    hidden = [t for t in trials if any(name.startswith(".") for name in t["left"])]
    assert len(hidden) >= 5, "the kills met no write: there was nothing to test"
    assert {tuple(trial["kept"]) for trial in trials} == {tuple(OLD), tuple(NEW)}


def test_two_ranks_go_through_every_mishap_together(told):
    one, other = told["ranks"]
    assert one == other
    mistake, norms, steps, full, left, nan, path, again, last, fields = one
    assert mistake == (
        "rank 1: batch of dp rank 1: loss_mask: found nothing, expected a column [rows, tokens]"
    )
    assert norms == (
        "step 11: the ranks told different norms (9.0 at step 11, 10.0 at step 11); "
        "nothing was recorded"
    )
    assert (steps, nan) == ("disagreed", "non_finite")
    assert "was not written (rank 1: OSError: [Errno 28] No space left on device)" in full
    assert left == "[]" and path.endswith("iter_0000015")
    assert again.endswith("is there already and was left as it is")
    assert "gated_linear_unit=True instead of nothing would explain it" in fields
    assert last == "9.0"  # rank 0's, and neither NaN nor what the ranks disagreed about


def test_writing_weights_needs_memory_for_a_piece_and_no_more(told):
    # MiB, for 32 pieces of 4 MiB; a copy of all of them would be 128
    assert told["memory"] <= 24


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB: two of these snapshots go in."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system; the same is tested with an injected error")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_once_and_leaves_what_was_there(small_disk, caplog):
    recorder = new_recorder(small_disk, rows=400)
    seen = [spike(recorder, step, 10.0 ** (step - 8)) for step in range(11, 21)]
    written = [o for o in seen if o.path is not None]
    failed = [o for o in seen if o.path is None]
    assert written and failed and all(o.event is Event.SPIKE for o in seen)
    assert "training goes on without it" in failed[0].note
    assert [r.getMessage() for r in caplog.records if r.name == "replay_lib.recorder"] == [
        failed[0].note
    ]
    root = recorder.roots[Event.SPIKE]
    assert sorted(root.iterdir()) == recorder.snapshots(Event.SPIKE)
    for path in recorder.snapshots(Event.SPIKE):
        assert len(read_tensors(open_snapshot(path).path)) == len(KEYS)


def test_an_injected_error_too_and_the_next_spike_is_written(tmp_path, monkeypatch):
    recorder = new_recorder(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(job_module, "write_shared_files", full)
        seen = spike(recorder, 11)
    assert seen.path is None and "OSError: [Errno 28] No space left on device" in seen.note
    assert list(recorder.roots[Event.SPIKE].iterdir()) == []
    assert spike(recorder, 12).path is not None


def test_after_the_first_step_a_bad_batch_costs_its_snapshot_alone(tmp_path):
    recorder = new_recorder(tmp_path)
    recorder.observe(10, 1.0, batch_of())
    seen = recorder.observe(11, 9.0, {"input_ids": [[1]]})
    assert seen.event is Event.SPIKE and seen.path is None and "loss_mask" in seen.note
    assert spike(recorder, 12).path is not None


def test_with_raise_failures_it_is_an_error(tmp_path):
    recorder = new_recorder(tmp_path, raise_failures=True)
    recorder.observe(10, 1.0, batch_of())
    with pytest.raises(Exception, match="loss_mask: found nothing"):
        recorder.observe(11, 9.0, {"input_ids": [[1]]})


def test_a_function_is_no_batch_of_a_job(tmp_path):
    with pytest.raises(UsageError, match="batch: found a function, expected this rank's batch"):
        new_recorder(tmp_path).observe(0, 1.0, lambda median: None)
