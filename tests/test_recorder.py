"""A training run's norms go by; spikes and one quiet step are kept, nothing else is."""

from __future__ import annotations

import dataclasses
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from replay_lib.errors import SnapshotError
from replay_lib.recorder import Event, SpikeRecorder
from replay_lib.snapshot import SpikeSettings, load_batch, open_snapshot, read_content
from replay_lib.unfinished import hidden_sibling

EMBEDDED = Path(__file__).parents[1] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
QUIET_STEPS = [0.40, 0.42, 0.38, 0.41, 0.43, 0.39, 0.40, 0.42, 0.41, 0.40]  # warm-up: 10 steps


@pytest.fixture(scope="module")
def content():
    return read_content(open_snapshot(EMBEDDED))


class Run:
    """Feeds norms to a recorder and counts how often a snapshot's content was asked for."""

    def __init__(self, directory, content, **options):
        self.recorder = SpikeRecorder(directory, **options)
        self.content = content
        self.step = 0
        self.made = 0

    def __call__(self, *norms):
        return [self._one(norm) for norm in norms]

    def _one(self, norm):
        def make(median):
            self.made += 1
            return dataclasses.replace(
                self.content, step=step, grad_norm_preclip=norm, grad_norm_median=median
            )

        step = self.step
        self.step += 1
        return self.recorder.observe(step, norm, make)

    def names(self, event):
        return [p.name for p in self.recorder.snapshots(event)]


@pytest.fixture
def run(tmp_path, content):
    return Run(tmp_path, content)


def test_a_spike_is_written_with_norm_and_median_of_the_steps_before(run, content):
    run(*QUIET_STEPS)
    (seen,) = run(1.3)
    assert (seen.event, seen.median, seen.note) == (Event.SPIKE, 0.41, "")
    assert seen.ratio == pytest.approx(1.3 / 0.41)
    snapshot = open_snapshot(seen.path)
    assert (snapshot.step, snapshot.grad_norm_preclip, snapshot.grad_norm_median) == (10, 1.3, 0.41)
    assert snapshot.path.parent.name == "spike_snapshots" and snapshot.path.name == "iter_0000010"
    assert sorted(p.name for p in seen.path.glob("batch_rank*.pt")) == [
        "batch_rank0.pt",
        "batch_rank1.pt",
    ]
    assert load_batch(snapshot, 1).advantage.equal(content.batches[1].advantage)


def test_content_is_made_only_for_what_is_kept(run):
    run(*QUIET_STEPS)
    assert run.made == 0  # warm-up records nothing
    run(0.7, 0.75)  # neither spikes nor within a tenth of the median
    assert run.made == 0 and run.recorder.snapshots(Event.QUIET) == []
    run(0.41)
    assert run.made == 1 and run.names(Event.QUIET) == ["iter_0000012"]
    run(0.41, 0.41)
    assert run.made == 1


def test_the_quiet_step_lies_beside_and_is_replaced_when_it_is_old(tmp_path, content):
    run = Run(tmp_path, content, quiet_every=3)
    run(*QUIET_STEPS)
    seen = run(0.41, 0.41, 0.41, 0.41)
    assert [o.event for o in seen] == [Event.QUIET, Event.ORDINARY, Event.ORDINARY, Event.QUIET]
    assert run.names(Event.QUIET) == ["iter_0000013"]
    assert seen[-1].path == tmp_path / "quiet_snapshots" / "iter_0000013"
    assert [p.name for p in (tmp_path / "quiet_snapshots").iterdir()] == ["iter_0000013"]


def test_no_quiet_step_is_kept_where_none_is_wanted(tmp_path, content):
    run = Run(tmp_path, content, quiet_every=0)
    assert {o.event for o in run(*QUIET_STEPS, 0.41, 0.41)} == {Event.ORDINARY}
    assert run.made == 0


def test_the_oldest_whole_snapshots_go_first(run, tmp_path):
    run(*QUIET_STEPS)
    run(2.0, 2.1, 2.2)
    stranger = tmp_path / "spike_snapshots" / "latest_checkpointed_iteration.txt"
    stranger.write_text("12")
    run(2.3, 2.4)
    assert run.names(Event.SPIKE) == ["iter_0000012", "iter_0000013", "iter_0000014"]
    assert sorted(p.name for p in stranger.parent.iterdir()) == [
        *run.names(Event.SPIKE),
        stranger.name,
    ]


def test_without_a_limit_all_are_kept_and_switched_off_none(tmp_path, content):
    unlimited = SpikeSettings(enabled=True, warmup_steps=0, max_snapshots=0)
    run = Run(tmp_path / "all", content, spike=unlimited)
    run(0.4, 1.0, 1.1, 3.0, 3.1)
    assert len(run.names(Event.SPIKE)) == 3
    off = Run(tmp_path / "off", content, spike=SpikeSettings(enabled=False))
    assert {o.event for o in off(*QUIET_STEPS, 9.0, 0.41)} == {Event.ORDINARY}
    assert off.made == 0 and not (tmp_path / "off").exists()


@pytest.mark.parametrize("norm", [math.nan, math.inf, None])
def test_a_norm_that_is_no_number_is_told_and_not_recorded(run, norm):
    run(*QUIET_STEPS)
    (seen,) = run(norm)
    told = {None: "missing"}.get(norm, str(norm))
    assert (seen.event, seen.path, seen.ratio) == (Event.NON_FINITE, None, None)
    assert seen.note == f"step 10: the gradient norm is {told}; nothing was recorded"
    assert run(1.3)[0].event is Event.SPIKE  # and it did not move the median
    assert run.recorder.detector.median == 0.41


def test_a_restarted_run_leaves_the_snapshot_of_the_same_step(run, tmp_path, content):
    run(*QUIET_STEPS, 1.3)
    again = Run(tmp_path, content)
    again(*QUIET_STEPS)
    (seen,) = again(1.4)
    assert again.made == 0
    assert seen.note == f"step 10: {seen.path} is there already and was left as it is"
    assert open_snapshot(seen.path).grad_norm_preclip == 1.3


def test_a_run_that_continues_brings_its_history(tmp_path, content):
    run = Run(tmp_path, content, history=QUIET_STEPS)
    run.step = 10
    assert run(1.3)[0].event is Event.SPIKE


@pytest.mark.parametrize("loud", [False, True])
def test_an_error_while_writing_leaves_nothing_and_keeps_what_was_there(
    tmp_path, content, loud, caplog
):
    run = Run(tmp_path, content, raise_failures=loud)
    run(*QUIET_STEPS, 1.3, 1.4, 1.5)
    before = run.names(Event.SPIKE)
    run.content = dataclasses.replace(content, batches=content.batches[:1])
    if loud:
        with pytest.raises(SnapshotError, match=r"batches: found 1, expected dp_size = 2"):
            run(2.9)
    else:
        seen = run(2.9, 2.8)  # training goes on, and one warning is enough
        assert [o.event for o in seen] == [Event.SPIKE] * 2 and seen[0].path is None
        assert "was not written (SnapshotError: " in seen[0].note
        told = [r for r in caplog.records if r.name == "replay_lib.recorder"]
        assert [r.getMessage() for r in told] == [seen[0].note]
    assert run.names(Event.SPIKE) == before
    root = run.recorder.roots[Event.SPIKE]
    assert sorted(p.name for p in root.iterdir()) == before


def test_what_a_killed_run_left_is_cleared_by_the_next_one_and_nothing_else(run, tmp_path):
    run(*QUIET_STEPS, 1.3, 1.4, 1.5)
    root = run.recorder.roots[Event.SPIKE]
    left = root / f".iter_0000009.{socket.gethostname()}-abcdefgh.part"
    left.mkdir()
    (left / "batch_rank0.pt").write_bytes(b"half")
    (root / "iter_0000099").mkdir()  # a fourth one: killed before the rotation
    others = [root / ".iter_0000099", root / ".hidden", root.with_name("spike_snapshots-active")]
    for other in others:
        (other / "iter_0000010").mkdir(parents=True)
    with hidden_sibling(root / "iter_0000100") as at_work:
        SpikeRecorder(tmp_path)
        assert at_work.exists() and not left.exists()
    assert run.names(Event.SPIKE) == ["iter_0000011", "iter_0000012", "iter_0000099"]
    assert all((other / "iter_0000010").exists() for other in others)
    hidden = sorted(p.name for p in root.iterdir() if p.name.startswith("."))
    assert hidden == [".hidden", ".iter_0000099"]


def test_recording_needs_no_torch_until_it_writes():
    code = "import sys, replay_lib.recorder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
