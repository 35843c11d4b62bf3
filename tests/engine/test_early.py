"""What stops a session before its worker starts: devices and rows that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_lib.engine import early
from replay_lib.engine.early import check_before_start, check_rows
from replay_lib.errors import TrainerError, UsageError
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.pickles import file_names
from replay_lib.snapshot.portable.writing import export_snapshot

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
MERGED = ROOT / "tests/data/snap/merged/iter_0000085"


def test_an_absent_device_says_what_hides_it_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError) as caught:
        early.resolve_device("cuda")
    assert str(caught.value) == (
        "--device: found cuda, but no NVIDIA device is visible here (CUDA_VISIBLE_DEVICES is ''), "
        "expected a device of this machine. Take --device cpu, or auto for what is here; "
        "spike-replay doctor tells what that is"
    )
    assert early.resolve_device("auto") == early.resolve_device("cpu") == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(early, "has_cuda", lambda: True)
    assert early.resolve_device("auto") == early.resolve_device("cuda") == "cuda"


@pytest.mark.parametrize("rows", ["merged", "unmerged"])
def test_rows_of_trees_are_refused_where_no_batch_names_one(rows: str, tmp_path: Path) -> None:
    export_snapshot(open_snapshot(PLAIN), tmp_path / "plain")
    export_snapshot(open_snapshot(MERGED), tmp_path / "merged")
    for snapshot in (PLAIN, tmp_path / "plain"):
        with pytest.raises(UsageError) as caught:
            check_rows(snapshot, rows)
        assert str(caught.value) == (
            f"{snapshot}: rows: found {rows} asked for where no row is a prefix tree (merge_info), "
            "expected recorded. Leave the option --rows out"
        )
        check_rows(snapshot, "recorded")
    for snapshot in (MERGED, tmp_path / "merged"):
        check_rows(snapshot, rows)


def test_a_file_that_cannot_be_searched_is_left_to_the_reader(tmp_path: Path) -> None:
    broken = tmp_path / "batch.pt"
    assert file_names(broken, "merge_info")
    broken.write_bytes(b"PK\x05\x06" + bytes(18))
    assert file_names(broken, "merge_info")


def test_everything_is_checked_together() -> None:
    assert check_before_start(PLAIN, device="cpu", rows="recorded", trainer="grpo") == "cpu"
    with pytest.raises(UsageError, match="no row is a prefix tree"):
        check_before_start(PLAIN, device="cpu", rows="merged", trainer="grpo")
    with pytest.raises(UsageError, match="expected auto, cpu or cuda"):
        check_before_start(PLAIN, device="tpu", rows="recorded", trainer="grpo")
    with pytest.raises(TrainerError, match="no_such_module"):
        check_before_start(PLAIN, device="cpu", rows="recorded", trainer="no_such_module:make")
