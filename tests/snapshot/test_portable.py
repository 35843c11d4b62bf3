"""Portable snapshots: nothing lost, nothing executed, nothing half written, nothing unnoticed."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_write_snapshot import assert_same_batch, assert_same_content, assert_same_row

from replay_lib.errors import (
    SnapshotError,
    UsageError,
)
from replay_lib.snapshot import (
    Content,
    SavedHandle,
    export_snapshot,
    import_snapshot,
    load_batch,
    load_grad_info,
    load_handles,
    load_model_fields,
    load_settings,
    open_snapshot,
    payload_counts,
    read_content,
    read_settings,
    read_tensors,
    write_snapshot,
)
from replay_lib.snapshot.checkpoint import stored_table
from replay_lib.snapshot.portable import weights
from replay_lib.snapshot.portable.codec import from_bytes, to_bytes

PLAIN_FILES = {
    *("portable.json", "snapshot.json", "worker_config.json", "run_config.json", "trainer.json"),
    *("batch_dp0.json", "batch_dp0.safetensors", "batch_dp1.json", "batch_dp1.safetensors"),
    *("routing_dp0.safetensors", "routing_dp1.safetensors", "weights-00001.safetensors"),
    *("grad_info_rank0.json", "grad_info_rank1.json"),
}


def test_the_directory_holds_json_and_safetensors_alone(exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == PLAIN_FILES
    for path in exported.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text(), parse_constant=pytest.fail)  # strict
        else:
            with safe_open(path, framework="pt") as file:
                assert list(file.keys())


def test_all_that_a_snapshot_holds_is_read_back(exported: Path, plain: Path) -> None:
    source, portable = open_snapshot(plain), open_snapshot(exported)
    assert portable.portable and not source.portable
    same = ("step", "grad_norm_preclip", "grad_norm_median", "spike_ratio_recorded", "spike")
    same += ("metadata_version", "parallel", "worker", "routing_payload_count_rank0")
    for name in same:
        assert getattr(source, name) == getattr(portable, name), name
    assert_same_content(read_content(source), read_content(portable))
    assert load_model_fields(source) == load_model_fields(portable)
    assert read_settings(source) == read_settings(portable)
    assert payload_counts(source) == payload_counts(portable)
    for rank in (0, 1):
        assert load_grad_info(source, rank) == load_grad_info(portable, rank)
        assert load_handles(source, rank)[0] == load_handles(portable, rank)[0]


@pytest.mark.parametrize("name", ["plain", "merged"])
def test_import_gives_the_trainers_layout_again(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    source = open_snapshot(request.getfixturevalue(name))
    portable = export_snapshot(source, tmp_path / "portable")
    back = import_snapshot(portable, tmp_path / "iter_0000085")
    assert not back.portable
    assert {p.name for p in back.path.iterdir()} == {
        p.name for p in source.path.iterdir() if p.name != "__1_0.distcp"
    }
    one, other = (read_content(s, keep_handles=True) for s in (source, back))
    assert_same_content(one, other)
    for left, right in zip(one.batches, other.batches, strict=True):
        for row, again in zip(left.merge_info or (), right.merge_info or (), strict=True):
            assert_same_row(row, again)
    for rank in (0, 1):
        before, after = load_handles(source, rank), load_handles(back, rank)
        assert before[0] == after[0]
        assert all(torch.equal(rows, after[1][key]) for key, rows in before[1].items())


def test_an_export_of_an_export_is_the_same_to_the_byte(tmp_path: Path, exported: Path) -> None:
    again = export_snapshot(open_snapshot(exported), tmp_path / "again")
    for path in exported.iterdir():
        assert path.read_bytes() == (again.path / path.name).read_bytes(), path.name


def test_settings_of_another_trainer_version_are_kept(tmp_path: Path, content: Content) -> None:
    newer = dataclasses.replace(content, saved_settings={"new_option": 7, "opd": {"inner": [1]}})
    source = write_snapshot(tmp_path / "iter_0000085", newer)
    portable = export_snapshot(source, tmp_path / "portable")
    back = import_snapshot(portable, tmp_path / "back" / "iter_0000085")
    for snapshot in (source, portable, back):
        assert {"new_option", "opd.inner"} <= set(read_settings(snapshot).unknown)
        assert load_settings(snapshot) == content.settings


def test_norms_that_are_no_numbers_survive(tmp_path: Path, content: Content) -> None:
    odd = dataclasses.replace(content, grad_norm_preclip=math.inf, grad_norm_median=math.nan)
    source = write_snapshot(tmp_path / "iter_0000085", odd)
    portable = export_snapshot(source, tmp_path / "portable")
    assert portable.grad_norm_preclip == math.inf
    assert portable.grad_norm_median is not None and math.isnan(portable.grad_norm_median)


def test_names_of_objects_may_be_text(tmp_path: Path, content: Content) -> None:
    routes = [route for route in content.batches[0].routes if route is not None]
    row = tuple(((SavedHandle(ref=f"node:{n}", rows=rows),),) for n, rows in enumerate(routes))
    other = tuple(((SavedHandle(ref=b"x" * 28, rows=routes[0]),),) for _ in range(7))
    batches = (content.batches[0], content.batches[1])
    kept = dataclasses.replace(content, batches=batches, handles=(row, other))
    source = write_snapshot(tmp_path / "iter_0000085", kept)
    portable = export_snapshot(source, tmp_path / "portable")
    back = import_snapshot(portable, tmp_path / "back" / "iter_0000085")
    for snapshot in (source, portable, back):
        paths, _ = load_handles(snapshot, 0)
        assert paths[1] == [[("node:1", 0, None)]]
        assert load_handles(snapshot, 1)[0][0] == [[((b"x" * 28,), 0, None)]]


def test_a_rank_without_routes_has_no_file_of_them(tmp_path: Path, content: Content) -> None:
    batches = (content.batches[0].replace(routes=()), content.batches[1])
    source = write_snapshot(
        tmp_path / "iter_0000085", dataclasses.replace(content, batches=batches, handles=None)
    )
    portable = export_snapshot(source, tmp_path / "portable")
    assert payload_counts(portable) == {0: 0, 1: 7}
    assert not (portable.path / "routing_dp0.safetensors").exists()
    assert_same_batch(load_batch(source, 0), load_batch(portable, 0))


def test_weights_are_spread_over_files_and_mapped(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SHARD", 100_000)
    portable = export_snapshot(open_snapshot(plain), tmp_path / "portable")
    files = [name for name in portable.sizes if name.startswith("weights-")]
    assert len(files) > 3
    assert list(stored_table(portable.path)) == sorted(read_tensors(plain))
    mapped = read_tensors(portable.path)
    for key, tensor in read_tensors(plain).items():
        assert torch.equal(tensor, mapped[key]), key
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(portable.path / files[0]) in maps.read_text()
    mapped["decoder.final_layernorm.weight"].zero_()  # reaches no file
    assert read_tensors(portable.path)["decoder.final_layernorm.weight"].abs().sum() > 0


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replay_lib.snapshot.portable.writing.write_manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_snapshot(open_snapshot(plain), tmp_path / "out" / "portable")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_export_that_is_killed_leaves_no_snapshot(tmp_path: Path, plain: Path) -> None:
    code = (
        "import os, sys\n"
        "from replay_lib.snapshot import export_snapshot, open_snapshot\n"
        "from replay_lib.snapshot.portable import writing\n"
        "writing.write_manifest = lambda _: os.kill(os.getpid(), 9)\n"
        "export_snapshot(open_snapshot(sys.argv[1]), sys.argv[2])\n"
    )
    target = tmp_path / "portable"
    killed = subprocess.run([sys.executable, "-c", code, str(plain), str(target)], check=False)
    assert killed.returncode == -9
    assert not target.exists()
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())  # no case, no snapshot


def test_an_existing_directory_is_left_alone(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(SnapshotError, match="found a directory that exists, expected a new name"):
        export_snapshot(open_snapshot(plain), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_the_trainer_wrote_cannot_be_imported(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(UsageError, match="a snapshot in the trainer's own layout, expected what"):
        import_snapshot(open_snapshot(plain), tmp_path / "out")


def test_opening_needs_no_torch(exported: Path) -> None:
    code = (
        "import sys; from replay_lib.snapshot import open_snapshot, load_model_fields;"
        f"load_model_fields(open_snapshot({str(exported)!r}));"
        "sys.exit(any(m in sys.modules for m in ('torch', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "b": {}},
        {"$float": "NaN"},
        {1: "one", (2, 3): [b"\0\xff"]},
        ((), [()], {"$x": 1, "y": 2}),
        [math.inf, -math.inf, 1e-320, 10**30],
        "\ud800 lone",
    ],
)
def test_json_keeps_any_plain_value(value: Any) -> None:
    from replay_lib.snapshot.portable.codec import encode

    again = from_bytes(to_bytes(encode(value)), Path("x.json"))
    assert again == value and type(again) is type(value)


def test_json_refuses_objects() -> None:
    from replay_lib.snapshot.portable.codec import encode

    for value in (object(), torch.zeros(1), {"a": {1}}):
        with pytest.raises(ValueError, match="which has no place in JSON"):
            encode(value)


def test_settings_are_the_ones_that_were_saved(exported: Path, plain: Path) -> None:
    assert load_settings(open_snapshot(exported)) == load_settings(open_snapshot(plain))
