"""Changes to the files of a snapshot on disk, in place; see :mod:`mutate`."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
from mutate import condition
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from replay_lib.snapshot import read_tensors
from replay_lib.snapshot.naming import Call, Instance, named, save_named


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    """Every ``old`` in a torch file becomes ``new`` (of any length), its checksums set to zero."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    if not any(old in data for data in records.values()):
        raise ValueError(f"{path} does not hold {old!r}")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, data.replace(old, new) if name.endswith("data.pkl") else data)


@condition("E1")
def split_checkpoint(directory: Path, *, layers: int = 2, experts: int = 2) -> None:
    """Stored as pipeline stages and expert ranks do: chunks of layers and experts in many files.

    The optimizer's entries point to a file that is not there: whoever asks for them fails.
    """
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    files: dict[str, io.BytesIO] = {}
    for key, whole in read_tensors(directory).items():
        sizes = list(whole.shape)
        stacked, spread = key.startswith("decoder.layers."), ".experts.experts." in key
        sizes[0] //= layers if stacked else 1
        sizes[min(1, len(sizes) - 1)] //= experts if spread else 1
        chunks = []
        for offsets in _grid(list(whole.shape), sizes):
            stage = offsets[0] // sizes[0] if stacked else 0
            expert_rank = offsets[1] // sizes[1] if spread else 0
            name = f"__{stage * experts + expert_rank}_0.distcp"
            stream = files.setdefault(name, io.BytesIO())
            start = stream.tell()
            part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            torch.save(part.clone(), stream)
            index = MetadataIndex(key, torch.Size(offsets))
            places[index] = _StorageInfo(name, start, stream.tell() - start)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        properties = TensorProperties.create_from_tensor(whole)
        described[key] = TensorStorageMetadata(properties, whole.shape, chunks)
    optimizer = "optimizer.state.exp_avg.decoder.layers.mlp.router.weight"
    described[optimizer] = described["decoder.final_layernorm.weight"]
    length = described[optimizer].size[0]
    places[MetadataIndex(optimizer, torch.Size([0]))] = _StorageInfo("__9_0.distcp", 0, length)
    for old in directory.glob("*.distcp"):
        old.unlink()
    for name, stream in files.items():
        (directory / name).write_bytes(stream.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata(described, None, places)))


def _grid(shape: list[int], sizes: list[int]) -> list[list[int]]:
    offsets: list[list[int]] = [[]]
    for length, step in zip(shape, sizes, strict=True):
        offsets = [[*o, start] for o in offsets for start in range(0, length, step)]
    return offsets


@condition("E8")
def foreign_objects(directory: Path, kind: str) -> str:
    """An object of another library inside the batch file; returns the global that it names."""
    made: dict[str, tuple[Any, str]] = {
        "argparse": (argparse.Namespace(lr=1.0), "argparse.Namespace"),
        "numpy-scalar": (numpy.float64(1.0), "multiarray.scalar"),
        "ray": (Call(named("ray.ObjectRef"), (b"x" * 28,)), ""),
        "ray-old": (Call(named("ray._raylet.ObjectRef"), (b"x" * 28,)), ""),
        "function": (Instance(named("some.module.Anything"), {}), "some.module.Anything"),
    }
    value, name = made[kind]
    add_to_batch(directory / "batch_rank0.pt", extra=value)
    return name


def add_to_batch(path: Path, **columns: Any) -> None:
    """A batch file of one row with additional columns."""
    full: dict[str, Any] = {
        "index": torch.arange(1),
        "input_ids": torch.ones(1, 4, dtype=torch.int64),
        "labels": torch.full((1, 4), -100),
        "loss_mask": torch.zeros(1, 4, dtype=torch.bool),
        "attention_mask": torch.ones(1, 4, dtype=torch.bool),
        "advantage": torch.zeros(1, 4),
        **columns,
    }
    state = {"_tensordict": full}
    save_named(Instance(named("axrl.data.sample.SampleTensorDict"), state), path)


@condition("E9")
def other_tensordict(directory: Path, form: str) -> None:
    """Routing handles in the wrappers of other tensordict versions; one handle, two rows."""
    state = {"ref": Call(named("ray.ObjectRef"), (b"x" * 28,)), "row_start": 0, "row_count": None}
    handle = Instance(named("axrl.utils.tensor_store.TensorHandle"), state)
    wrapped = Instance(named("tensordict.tensorclass.NonTensorData"), {"data": [[handle]]})
    forms: dict[str, Any] = {
        "data": {"data": [[[handle]]]},
        "nested": {"tensordict": None, "non_tensordict": {"data": [[[handle]]]}},
        "stack": {"_tensordict": {"tensordicts": [wrapped]}},
    }
    name = "NonTensorStack" if form == "stack" else "NonTensorData"
    column = Instance(named(f"tensordict.tensorclass.{name}"), forms[form])
    add_to_batch(directory / "batch_rank0.pt", routing_handles_per_path=column)
    routes = [torch.tensor([[[0, 1]] * 4] * 3, dtype=torch.int16).numpy()]
    save_named(routes, directory / "routing_payload_rank0.pt")


@condition("E10")
def other_numpy(directory: Path, name: str) -> None:
    """Arrays pickled under the other name of numpy's module."""
    path = directory / "routing_payload_rank0.pt"
    for known in (b"numpy._core.multiarray", b"numpy.core.multiarray"):
        if known in path.read_bytes():
            replace_bytes(path, known, name.encode())
            return


@condition("E11")
def corrupt_rank(directory: Path, rank: int) -> None:
    """One byte of a tensor in one rank's batch is another one."""
    flip_in_record(directory / f"batch_rank{rank}.pt")


def flip_in_record(path: Path) -> None:
    """One bit of the largest record of a torch file (between records lies padding)."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
        values = archive.read(largest)
    data = bytearray(path.read_bytes())
    data[data.index(values) + len(values) // 2] ^= 64
    path.write_bytes(data)


@condition("E18")
def unread_loss_setting(directory: Path, value: Any) -> None:
    """A loss setting of a newer trainer."""
    config = Instance(
        named("axrl.configs.GrpoTrainerConfig"),
        {"__dict__": {"loss_type": "grpo2", "brand_new_term": value}},
    )
    path = directory / "trainer.pt"
    save_named(Instance(named("axrl.trainer.grpo_trainer.GrpoTrainer"), {"config": config}), path)


@condition("E19")
def bare_words(directory: Path, **values: Any) -> None:
    """Metadata with other values; Python writes NaN and infinity as bare words."""
    path = directory / "axrl_metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@condition("E19")
def legacy_metadata(directory: Path) -> None:
    """Version 1: the trainer's metadata over Megatron's, no version, no counts."""
    old = json.loads((directory / "axrl_metadata.json").read_text())
    for key in ("metadata_version", "megatron_worker_config_file", "trainer_file"):
        del old[key]
    del old["routing_payload_count_rank0"]
    (directory / "axrl_metadata.json").unlink()
    (directory / "metadata.json").write_text(json.dumps(old))


@condition("E15")
def real_writer(directory: Path) -> Metadata:
    """The table of a checkpoint that a training run wrote: optimizer and RNG state are in it."""
    found: Metadata = FileSystemReader(directory).read_metadata()
    return found
