"""A pickle that would run a command, in every file that holds a pickle: nothing runs."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from replay_lib.errors import SnapshotError, UnsafePickleError
from replay_lib.snapshot import (
    load_batch,
    load_grad_info,
    load_model_fields,
    load_settings,
    open_snapshot,
    payload_counts,
    read_tensors,
)
from replay_lib.snapshot.naming import Call, Instance, named, save_named
from replay_lib.snapshot.pickles import load_stream


class Evil:
    """Runs a shell command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def read_everything(directory: Path) -> None:
    """All that any command reads of a snapshot."""
    snapshot = open_snapshot(directory)
    load_model_fields(snapshot)
    load_settings(snapshot)
    payload_counts(snapshot)
    for dp_rank in range(snapshot.parallel.dp):
        load_batch(snapshot, dp_rank)
        load_grad_info(snapshot, dp_rank)
    read_tensors(directory)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once a payload has run."""
    return tmp_path / "it-ran"


def test_the_payload_would_run(marker: Path) -> None:
    """The control: without our reader the marker appears."""
    buffer = io.BytesIO()
    torch.save([Evil(f"touch {marker}")], buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)
    assert marker.exists()


def test_the_whole_snapshot_reads_without_a_payload(plain: Path) -> None:
    read_everything(plain)


READ = ("batch_rank0.pt", "batch_rank1.pt", "routing_payload_rank1.pt", "grad_info_rank0.pt")


@pytest.mark.parametrize("name", [*READ, "trainer.pt"])
def test_a_payload_in_a_file_that_is_read_is_refused(
    broken_plain: Path, marker: Path, name: str
) -> None:
    torch.save([Evil(f"touch {marker}")], broken_plain / name)
    with pytest.raises(UnsafePickleError) as caught:
        read_everything(broken_plain)
    assert str(caught.value) == (
        f"{broken_plain / name}: found a pickle that asks for posix.system, expected only the "
        "classes that a snapshot of AXRL holds. Nothing of it was run. Do not load this file "
        "with other tools; if the trainer is yours and the class is plain data, ask for it to be "
        "added to the list."
    )
    assert not marker.exists()


@pytest.mark.parametrize("name", ["common.pt", "train_state.pt"])
def test_a_payload_in_a_file_that_is_never_opened(
    broken_plain: Path, marker: Path, name: str
) -> None:
    torch.save([Evil(f"touch {marker}")], broken_plain / name)
    read_everything(broken_plain)
    assert not marker.exists()


def test_a_payload_in_the_checkpoints_table(broken_plain: Path, marker: Path) -> None:
    path = broken_plain / ".metadata"
    path.write_bytes(pickle.dumps(Evil(f"touch {marker}")))
    with pytest.raises(UnsafePickleError, match=r"\.metadata: found a pickle that asks for posix"):
        read_everything(broken_plain)
    assert not marker.exists()


def test_a_payload_inside_a_valid_table(broken_plain: Path, marker: Path) -> None:
    metadata = FileSystemReader(broken_plain).read_metadata()
    metadata.planner_data = Evil(f"touch {marker}")
    (broken_plain / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafePickleError, match="asks for posix"):
        read_tensors(broken_plain)
    assert not marker.exists()


def replace_object(directory: Path, key: str, payload: bytes) -> None:
    """Put ``payload`` into the checkpoint as the object ``key``."""
    metadata = FileSystemReader(directory).read_metadata()
    stored = next(v for i, v in metadata.storage_data.items() if i.fqn == key)
    file = directory / stored.relative_path
    stored.offset, stored.length = file.stat().st_size, len(payload)
    with file.open("ab") as stream:
        stream.write(payload)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_payload_as_extra_state_is_never_opened(broken_plain: Path, marker: Path) -> None:
    metadata = FileSystemReader(broken_plain).read_metadata()
    key = next(k for k in metadata.state_dict_metadata if "_extra_state" in k)
    replace_object(broken_plain, key, saved([Evil(f"touch {marker}")]))
    read_everything(broken_plain)
    assert not marker.exists()


def test_a_payload_in_place_of_a_parameter(broken_plain: Path, marker: Path) -> None:
    payload = saved([Evil(f"touch {marker}")])
    replace_object(broken_plain, "output_layer.weight", payload)
    with pytest.raises(UnsafePickleError, match=r"output_layer\.weight\): found a pickle that"):
        read_tensors(broken_plain)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["column", "handle", "tree"])
def test_a_payload_deep_in_a_batch(broken_plain: Path, marker: Path, place: str) -> None:
    evil = Call(named("os.system"), (f"touch {marker}",))
    handle = Instance(named("axrl.utils.tensor_store.TensorHandle"), {"ref": evil})
    wrapper = named("tensordict.tensorclass.NonTensorData")
    columns = {
        "column": {"input_ids": evil},
        "handle": {"routing_handles_per_path": Instance(wrapper, {"data": [[[handle]]]})},
        "tree": {"merge_info": Instance(wrapper, {"data": [evil]})},
    }[place]
    batch = Instance(named("axrl.data.sample.SampleTensorDict"), {"_tensordict": columns})
    save_named(batch, broken_plain / "batch_rank0.pt")
    with pytest.raises(UnsafePickleError, match=r"asks for os\.system"):
        load_batch(open_snapshot(broken_plain), 0)
    assert not marker.exists()


PROGRAMS = {
    "REDUCE": "cposix\nsystem\n(S'touch {marker}'\ntR.",
    "INST": "(S'touch {marker}'\niposix\nsystem\n.",
    "OBJ": "(cposix\nsystem\nS'touch {marker}'\no.",
    "python 2 name": 'c__builtin__\neval\n(S\'open("{marker}", "w")\'\ntR.',
    "STACK_GLOBAL": "\x80\x04\x8c\x05posix\x8c\x06system\x93(S'touch {marker}'\ntR.",
    "getattr": "c__builtin__\ngetattr\n(ctorch\nSize\nS'__class__'\ntR.",
    "import by dots": "ctorch\nserialization.os.system\n(S'touch {marker}'\ntR.",
}


@pytest.mark.parametrize("way", PROGRAMS)
@pytest.mark.parametrize("name", ["trainer.pt", ".metadata"])
def test_every_way_to_name_a_function(
    broken_plain: Path, marker: Path, way: str, name: str
) -> None:
    program = PROGRAMS[way].format(marker=marker).encode("latin1")
    path = broken_plain / name
    if name == ".metadata":
        path.write_bytes(program)
    else:
        put_program(path, program)
    with pytest.raises(UnsafePickleError, match="Nothing of it was run"):
        read_everything(broken_plain)
    assert not marker.exists()


def put_program(path: Path, program: bytes) -> None:
    """Replace the pickle inside a torch archive, with correct checksums."""
    source = path.with_suffix(".old")
    shutil.move(path, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            data = program if info.filename.endswith("data.pkl") else old.read(info)
            new.writestr(info.filename, data)
    source.unlink()


def test_other_packages_safe_globals_do_not_count(broken_plain: Path) -> None:
    """What the process allows for itself is not allowed for a snapshot, and is kept."""
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([Evil]):
        inside = set(torch.serialization.get_safe_globals())
        save_named(Instance(named(f"{__name__}.Evil"), {}), broken_plain / "trainer.pt")
        with pytest.raises(UnsafePickleError, match=r"asks for .*Evil"):
            load_settings(open_snapshot(broken_plain))
        load_batch(open_snapshot(broken_plain), 0)
        assert set(torch.serialization.get_safe_globals()) == inside
    assert set(torch.serialization.get_safe_globals()) == before


def test_reading_leaves_no_global_behind(plain: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    read_everything(plain)
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_state_for_a_class_changes_no_class(broken_plain: Path) -> None:
    """BUILD on a class object could set its attributes."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (broken_plain / ".metadata").write_bytes(name + b"(N(dS'hacked'\nI1\nstb.")
    with pytest.raises(SnapshotError, match=r"\.metadata"):
        read_tensors(broken_plain)
    from torch.distributed.checkpoint.metadata import Metadata

    assert not hasattr(Metadata, "hacked")


def test_a_tensor_larger_than_its_record_is_refused() -> None:
    """torch would read beyond the record's end."""
    good = saved({"x": torch.arange(8)})
    assert good.count(b"K\x08t") == 1
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            data = old.read(info).replace(b"K\x08t", b"K\xf0t")
            new.writestr(info.filename, data)
    with pytest.raises(SnapshotError, match=r"record archive/data/0 of 64 bytes for 1920"):
        load_stream(buffer, "here", {})


def test_a_compressed_record_is_refused() -> None:
    """A small file could otherwise fill the memory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([0] * 1000, protocol=2))
    with pytest.raises(SnapshotError, match=r"compressed records, which torch\.save never"):
        load_stream(buffer, "here", {})
