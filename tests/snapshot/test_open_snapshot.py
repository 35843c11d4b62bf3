"""Opening a snapshot: what it states, what is missing, old and new metadata."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replay_lib.errors import IncompleteSnapshotError, SnapshotError
from replay_lib.snapshot import Parallel, open_snapshot

COPY_AGAIN = (
    "Wait until all ranks have finished writing, or copy the file again from where it was written."
)


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; ``...`` removes one."""
    value = json.loads(path.read_text())
    value = {key: item for key, item in {**value, **changes}.items() if item is not ...}
    path.write_text(json.dumps(value))


def test_plain_states_its_step_norms_and_layout(plain: Path) -> None:
    snapshot = open_snapshot(plain)
    assert snapshot.step == 85
    assert snapshot.grad_norm_preclip == 8.441921403762574
    assert snapshot.grad_norm_median == 2.105910566806221
    assert snapshot.spike_ratio_recorded == 4.008679920612875
    assert (snapshot.metadata_version, snapshot.legacy) == (2, False)
    assert snapshot.parallel == Parallel(tp=1, pp=1, vpp=None, cp=1, ep=1, etp=1, dp=2)
    assert snapshot.parallel.world_size == 2
    assert snapshot.routing_payload_count_rank0 == 15
    assert [(f.dp_rank, f.rank) for f in snapshot.dp_rank_files] == [(0, 0), (1, 1)]
    assert snapshot.dp_rank_files[1].batch == plain / "batch_rank1.pt"
    assert snapshot.dp_rank_files[1].routing == plain / "routing_payload_rank1.pt"
    assert snapshot.size == sum(p.stat().st_size for p in plain.iterdir())


def test_plain_states_its_worker_and_spike_settings(plain: Path) -> None:
    snapshot = open_snapshot(plain)
    worker, spike = snapshot.worker, snapshot.spike
    assert (worker.train_micro_batch_size, worker.use_dynamic_batch_size) == (1, True)
    assert (worker.seq_length, worker.clip_grad, worker.model_role) == (128, 1.0, "actor")
    assert (worker.enable_routing_replay, worker.bf16, worker.fp8) == (True, False, None)
    assert worker.unknown == ()
    assert (spike.spike_ratio, spike.warmup_steps, spike.history_window) == (2.0, 10, 100)


def test_opening_imports_no_torch(plain: Path) -> None:
    code = (
        "import sys; from replay_lib.snapshot import open_snapshot, load_model_fields;"
        f"load_model_fields(open_snapshot({str(plain)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("batch_rank1.pt", "the batch of rank 1"),
        ("routing_payload_rank0.pt", "15 routing payloads of rank 0"),
        ("trainer.pt", "the trainer, which holds the loss settings"),
        ("run_config.yaml", "the model's architecture"),
        (".metadata", "the table of the checkpoint's tensors"),
        ("metadata.json", "Megatron's mark of a complete checkpoint"),
    ],
)
def test_a_missing_file_is_named(broken_plain: Path, name: str, why: str) -> None:
    (broken_plain / name).unlink()
    with pytest.raises(IncompleteSnapshotError) as caught:
        open_snapshot(broken_plain)
    expected = f"{broken_plain / name}: found no such file, expected {why}. {COPY_AGAIN}"
    assert str(caught.value) == expected


def test_rank_0_was_killed_before_its_last_file(broken_plain: Path) -> None:
    (broken_plain / "axrl_metadata.json").unlink()
    with pytest.raises(IncompleteSnapshotError, match=r"axrl_metadata\.json: found no such file"):
        open_snapshot(broken_plain)


@pytest.mark.parametrize("name", ["batch_rank1.pt", "routing_payload_rank1.pt"])
def test_a_half_written_file_is_named(broken_plain: Path, name: str) -> None:
    path = broken_plain / name
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(IncompleteSnapshotError) as caught:
        open_snapshot(broken_plain)
    assert f"{path}: found 3000 bytes without the table that ends a whole file" in str(caught.value)


def test_half_written_metadata_is_incomplete(broken_plain: Path) -> None:
    path = broken_plain / "axrl_metadata.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(IncompleteSnapshotError, match="ends after 500 characters"):
        open_snapshot(broken_plain)


def test_a_rank_count_beyond_the_files_is_incomplete(broken_plain: Path) -> None:
    edit(broken_plain / "megatron_worker_config.json", tp_size=2)
    with pytest.raises(IncompleteSnapshotError, match=r"batch_rank2\.pt"):
        open_snapshot(broken_plain)


def test_the_directory_of_many_snapshots_is_told_apart(plain: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(plain.parent)
    assert str(caught.value) == (
        f"{plain.parent}: found 1 snapshot in it, expected one snapshot's own directory. "
        "Name one of: iter_0000085."
    )


def test_in_an_output_directory_the_snapshots_are_named(tmp_path: Path) -> None:
    kept = ("spike_snapshots/iter_0000061", "spike_snapshots-active/iter_0000085")
    for name in kept:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for place, above in ((tmp_path, "checkpoints/"), (tmp_path / "checkpoints", "")):
        with pytest.raises(SnapshotError) as caught:
            open_snapshot(place)
        named = ", ".join(f"{above}{name}" for name in kept)
        assert (
            f"2 snapshots in it, expected one snapshot's own directory. Name one of: {named}."
            in (str(caught.value))
        )


def as_legacy(directory: Path, **changes: Any) -> None:
    """AXRL's metadata over Megatron's, as the first version wrote it."""
    modern = directory / "axrl_metadata.json"
    modern.rename(directory / "metadata.json")
    absent = ("metadata_version", "trainer_file", "megatron_worker_config_file")
    dropped = dict.fromkeys((*absent, "routing_payload_count_rank0"), ...)
    edit(directory / "metadata.json", **{**dropped, **changes})


def test_legacy_metadata_is_read(broken_plain: Path) -> None:
    as_legacy(broken_plain)
    snapshot = open_snapshot(broken_plain)
    assert snapshot.legacy
    assert (snapshot.metadata_version, snapshot.routing_payload_count_rank0) == (None, None)
    assert snapshot.grad_norm_preclip == 8.441921403762574


def test_a_legacy_snapshot_may_lack_trainer_and_worker_file(broken_plain: Path) -> None:
    as_legacy(broken_plain, metadata_version=1)
    (broken_plain / "trainer.pt").unlink()
    (broken_plain / "megatron_worker_config.json").unlink()
    snapshot = open_snapshot(broken_plain)
    assert (snapshot.metadata_version, snapshot.worker.global_batch_size) == (1, 13)


def test_bare_infinity_nan_and_null_are_read(broken_plain: Path) -> None:
    path = broken_plain / "axrl_metadata.json"
    edit(path, grad_norm=math.inf, grad_norm_median=math.nan, spike_ratio_actual=None)
    assert "Infinity" in path.read_text()
    snapshot = open_snapshot(broken_plain)
    assert snapshot.grad_norm_preclip == math.inf
    assert snapshot.grad_norm_median is not None and math.isnan(snapshot.grad_norm_median)
    assert snapshot.spike_ratio_recorded is None


def test_absent_norms_are_none(broken_plain: Path) -> None:
    edit(broken_plain / "axrl_metadata.json", grad_norm=..., grad_norm_median=...)
    snapshot = open_snapshot(broken_plain)
    assert snapshot.grad_norm_preclip is None
    assert snapshot.grad_norm_median is None


def test_a_missing_step_is_the_directorys(broken_plain: Path) -> None:
    edit(broken_plain / "axrl_metadata.json", global_step=...)
    assert open_snapshot(broken_plain).step == 85


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"grad_norm": "8.4"}, "grad_norm: found '8.4', expected a number or null"),
        ({"grad_norm": 10**400}, "grad_norm: found an integer beyond float range"),
        ({"global_step": -1}, "global_step: found -1, expected an integer of 0 or more"),
        ({"metadata_version": 3}, "metadata_version: found 3, expected 1 or 2"),
    ],
)
def test_impossible_metadata_is_refused(
    broken_plain: Path, changes: dict[str, Any], text: str
) -> None:
    edit(broken_plain / "axrl_metadata.json", **changes)
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(broken_plain)
    assert f"axrl_metadata.json: {text}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp_size": 0}, "tp_size: found 0, expected an integer of 1 or more"),
        ({"ep_size": 3}, "ep_size: found ep 3 x etp 1, expected a divisor of tp x cp x dp = 2"),
        ({"train_micro_batch_size": 0}, "train_micro_batch_size: found 0, expected"),
        ({"model": {"name": "x"}}, "seq_length: found None, expected"),
        ({"spike_debug": {"spike_ratio": "two"}}, "spike_ratio: found 'two', expected"),
        ({"model": ["x"]}, "model: found ['x'], expected Input should be a valid dictionary"),
        ({"optimizer": "x"}, "optimizer: found 'x', expected Input should be a valid dictionary"),
        ({"optimizer": {"clip_grad": "x"}}, "clip_grad: found 'x', expected"),
    ],
)
def test_impossible_worker_settings_are_refused(
    broken_plain: Path, changes: dict[str, Any], text: str
) -> None:
    edit(broken_plain / "megatron_worker_config.json", **changes)
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(broken_plain)
    assert f"megatron_worker_config.json: {text}" in str(caught.value)


def test_unknown_worker_settings_are_named(broken_plain: Path) -> None:
    edit(broken_plain / "megatron_worker_config.json", new_option=1)
    assert open_snapshot(broken_plain).worker.unknown == ("new_option",)


def test_a_checkpoint_of_another_backend_is_refused(broken_plain: Path) -> None:
    edit(broken_plain / "metadata.json", sharded_backend="zarr")
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(broken_plain)
    path = broken_plain / "metadata.json"
    assert str(caught.value) == f"{path}: sharded_backend: found 'zarr', expected 'torch_dist'"


def test_rank_order_is_tp_cp_dp_pp() -> None:
    layout = Parallel(tp=2, pp=2, vpp=None, cp=2, ep=2, etp=1, dp=3)
    assert layout.world_size == 24
    assert [layout.first_rank(d) for d in range(3)] == [0, 4, 8]
    assert [layout.dp_rank(r) for r in (0, 3, 4, 11, 12, 23)] == [0, 0, 1, 2, 0, 2]
