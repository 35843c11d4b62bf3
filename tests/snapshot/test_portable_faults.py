"""A portable snapshot that was damaged, changed, or put together: only our own errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from replay_lib.errors import BatchError, IncompleteSnapshotError, SnapshotError, SpikeReplayError
from replay_lib.snapshot import (
    Snapshot,
    load_batch,
    load_model_fields,
    open_snapshot,
    read_content,
    read_tensors,
)
from replay_lib.snapshot.portable.codec import to_bytes
from replay_lib.snapshot.portable.manifest import KIND, write_manifest

PLAIN_FILES = {
    *("portable.json", "snapshot.json", "worker_config.json", "run_config.json", "trainer.json"),
    *("batch_dp0.json", "batch_dp0.safetensors", "batch_dp1.json", "batch_dp1.safetensors"),
    *("routing_dp0.safetensors", "routing_dp1.safetensors", "weights-00001.safetensors"),
    *("grad_info_rank0.json", "grad_info_rank1.json"),
}


def everything(snapshot: Snapshot) -> None:
    """Read all that can be read."""
    read_content(snapshot, keep_handles=True)
    load_model_fields(snapshot)


@pytest.mark.parametrize("name", sorted(PLAIN_FILES))
def test_one_changed_bit_is_found_in_whatever_file(broken: Path, name: str) -> None:
    content = bytearray((broken / name).read_bytes())
    content[len(content) * 2 // 3] ^= 1
    (broken / name).write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        everything(open_snapshot(broken))
    assert str(broken / name) in str(caught.value)


def test_what_is_not_read_is_not_hashed(broken: Path) -> None:
    path = broken / "weights-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    snapshot = open_snapshot(broken)  # names and sizes of all files
    load_batch(snapshot, 0)
    with pytest.raises(SnapshotError, match=r"weights-00001\.safetensors: sha256: found"):
        read_tensors(broken)


@pytest.mark.parametrize("name", sorted(PLAIN_FILES - {"portable.json"}))
def test_a_missing_or_short_file_is_named_when_it_is_opened(broken: Path, name: str) -> None:
    path = broken / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(IncompleteSnapshotError) as caught:
        open_snapshot(broken)
    assert f"{path}: found {len(content) - 1} bytes, expected {len(content)} bytes" in str(
        caught.value
    )
    path.unlink()
    with pytest.raises(IncompleteSnapshotError) as caught:
        open_snapshot(broken)
    told = f"{path}: found no such file, expected a file that portable.json lists"
    assert told in str(caught.value)


def test_a_longer_file_and_an_unknown_one_are_named(broken: Path) -> None:
    (broken / "extra.bin").write_bytes(b"x")
    with pytest.raises(SnapshotError, match=r"files it says nothing about: extra\.bin"):
        open_snapshot(broken)
    (broken / "extra.bin").unlink()
    (broken / "case.yaml").write_text("schema: 1\nsnapshot: .\n")  # may lie there
    open_snapshot(broken)
    with (broken / "trainer.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(SnapshotError, match=r"trainer\.json: found \d+ bytes, expected \d+ bytes"):
        open_snapshot(broken)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (2, "found 2, expected 1. A newer version of this package wrote it: take that one."),
        (0, "found 0, expected 1"),
        ("1", "found '1', expected 1"),
        (True, "found True, expected 1"),
        (None, "found None, expected 1"),
    ],
)
def test_the_schema_version_is_read_first(broken: Path, schema: Any, told: str) -> None:
    (broken / "portable.json").write_text(json.dumps({"schema": schema, "nothing": "else"}))
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(broken)
    assert str(caught.value) == f"{broken / 'portable.json'}: schema: {told}"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"schema": NaN}', '{"schema": 1}', '{"schema": {"$bytes": "zz"}}', "\0"],
)
def test_a_first_file_that_makes_no_sense_is_refused(broken: Path, text: str) -> None:
    (broken / "portable.json").write_text(text)
    with pytest.raises(SnapshotError, match=r"portable\.json"):
        open_snapshot(broken)


@pytest.mark.parametrize(
    "name",
    ["../outside.json", "/etc/passwd", "a/b", "", "case.yaml", "x" * 5000, "a\nb", "\ud800"],
)
def test_a_file_elsewhere_is_never_opened(broken: Path, name: str) -> None:
    raw = json.loads((broken / "portable.json").read_text())
    raw["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (broken / "portable.json").write_text(json.dumps(raw))
    with pytest.raises(SnapshotError, match="expected names of files in the directory"):
        open_snapshot(broken)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"$pairs": [[1, 2]]}, r"files\.\$pairs: found \[\[1, 2\]\], expected bytes and sha256"),
        ({"a": {"bytes": {"$float": "NaN"}}}, r"files\.a: found .*, expected bytes and sha256"),
        ({"a": {"bytes": 10**400, "sha256": "0"}}, r"sha256: found None, expected \w{64}, its own"),
        ([], r"files: found list, expected files by name"),
    ],
)
def test_files_that_are_no_list_of_files_are_refused(broken: Path, files: Any, told: str) -> None:
    raw = {"schema": 1, "kind": KIND, "files": files, "more": {"$bytes": "00"}}
    (broken / "portable.json").write_text(json.dumps(raw))
    with pytest.raises(SnapshotError, match=told):
        open_snapshot(broken)


def resealed(directory: Path) -> Snapshot:
    """As somebody would who changes a file and its digest."""
    (directory / "portable.json").unlink()
    write_manifest(directory)
    return open_snapshot(directory)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_bytes(to_bytes(value))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch_dp0.json", lambda v: v["paths"].pop()),
        ("batch_dp0.json", lambda v: v.update(trees=3)),
        ("batch_dp0.json", lambda v: v["paths"].__setitem__(0, [[[[1, 2], 0, None]]])),
        ("batch_dp0.json", lambda v: v["paths"].__setitem__(0, [[["x", True, None]]])),
        ("batch_dp0.json", lambda v: v["paths"].__setitem__(0, 3)),
        ("batch_dp0.json", lambda v: v["trees"].__setitem__(0, {"$tensor": "no such"})),
        ("trainer.json", lambda v: v.update(config=[])),
        ("trainer.json", lambda v: v["config"].update(clip_ratio_low="x")),
        ("run_config.json", lambda v: v.update(lines=[1])),
        ("run_config.json", lambda v: v.update(lines=["model: ["])),
        ("snapshot.json", lambda v: v.update(step=None)),
        ("snapshot.json", lambda v: v.update(step=10**400)),
        ("snapshot.json", lambda v: v.update(grad_norm_median=10**400)),
        ("snapshot.json", lambda v: v.update(grad_norm_preclip="x")),
        ("worker_config.json", lambda v: v.update(dp_size=5)),
        ("worker_config.json", lambda v: v.update(dp_size=10**12)),
        ("worker_config.json", lambda v: v.update(dp_size={"$tuple": [1]})),
        ("grad_info_rank0.json", lambda v: v.update(x=3)),
    ],
)
def test_a_sealed_file_that_contradicts_is_one_of_our_errors(
    broken: Path, name: str, change: Callable[[Any], None]
) -> None:
    edit(broken / name, change)
    with pytest.raises(SpikeReplayError) as caught:
        everything(resealed(broken))
    assert broken.name in str(caught.value)


@pytest.mark.parametrize("name", sorted(n for n in PLAIN_FILES if n.endswith(".safetensors")))
@pytest.mark.parametrize("tensors", [{}, {"x": torch.zeros(2)}, {"0": torch.zeros(2, 4, 2)}])
def test_sealed_tensors_that_are_others_are_refused(
    broken: Path, name: str, tensors: dict[str, torch.Tensor]
) -> None:
    save_file(tensors, broken / name)
    snapshot = resealed(broken)
    if name.startswith("weights"):  # the engine compares them with the model's
        assert set(read_tensors(broken)) == set(tensors)
        return
    with pytest.raises(BatchError):
        everything(snapshot)


@pytest.mark.parametrize("head", [b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0{}trailing"])
def test_sealed_bytes_that_are_no_tensors_are_refused(broken: Path, head: bytes) -> None:
    (broken / "batch_dp1.safetensors").write_bytes(head)
    with pytest.raises(SpikeReplayError, match=r"batch_dp1\.safetensors"):
        load_batch(resealed(broken), 1)


@pytest.mark.parametrize("name", ["weights-00002.safetensors", "optimizer"])
def test_weights_twice_or_of_no_model_are_refused(broken: Path, name: str) -> None:
    first = read_tensors(broken)
    if name == "optimizer":
        first = {"optimizer.state": torch.zeros(2)}
        (broken / "weights-00001.safetensors").unlink()
        save_file(first, broken / "weights-00001.safetensors")
    else:
        shutil.copy(broken / "weights-00001.safetensors", broken / name)
    resealed(broken)
    with pytest.raises(SnapshotError, match=r"a second time|no parameter's"):
        read_tensors(broken)


def test_a_gap_in_the_files_of_weights_is_seen(broken: Path) -> None:
    shutil.copy(broken / "weights-00001.safetensors", broken / "weights-00003.safetensors")
    resealed(broken)
    told = r"found weights-00003\.safetensors, expected weights-00002"
    with pytest.raises(SnapshotError, match=told):
        read_tensors(broken)
