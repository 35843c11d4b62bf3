"""Parameters out of a torch_dist checkpoint, by our reader and against torch's own."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from replay_lib.errors import IncompleteSnapshotError, SnapshotError, WeightsError
from replay_lib.snapshot import SafeReader, iter_tensors, read_tensors

LAYERS = "decoder.layers"
SHAPES = {
    "embedding.word_embeddings.weight": (128, 64),
    "output_layer.weight": (128, 64),
    "decoder.final_layernorm.weight": (64,),
    f"{LAYERS}.self_attention.linear_qkv.layer_norm_weight": (4, 64),
    f"{LAYERS}.self_attention.linear_qkv.weight": (4, 128, 64),
    f"{LAYERS}.self_attention.linear_proj.weight": (4, 64, 64),
    f"{LAYERS}.self_attention.q_layernorm.weight": (4, 16),
    f"{LAYERS}.self_attention.k_layernorm.weight": (4, 16),
    f"{LAYERS}.pre_mlp_layernorm.weight": (4, 64),
    f"{LAYERS}.mlp.router.weight": (4, 8, 64),
    f"{LAYERS}.mlp.experts.experts.linear_fc1.weight": (4, 8, 64, 64),
    f"{LAYERS}.mlp.experts.experts.linear_fc2.weight": (4, 8, 64, 32),
}


def load_by(reader: FileSystemReader, keys: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    state = {key: torch.full(shape, torch.nan) for key, shape in keys.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_all_parameters_and_nothing_else(plain: Path) -> None:
    tensors = read_tensors(plain)
    assert {key: tuple(t.shape) for key, t in tensors.items()} == SHAPES
    assert {t.dtype for t in tensors.values()} == {torch.float32}


def test_equal_to_torchs_own_reader(plain: Path, merged: Path) -> None:
    for directory in (plain, merged):
        theirs = load_by(FileSystemReader(directory), SHAPES)
        ours = read_tensors(directory)
        through_plan = load_by(SafeReader(directory), SHAPES)
        assert ours.keys() == theirs.keys() == through_plan.keys()
        for key, value in theirs.items():
            assert torch.equal(value, ours[key]), key
            assert torch.equal(value, through_plan[key]), key


def test_one_at_a_time(plain: Path) -> None:
    assert {key for key, _ in iter_tensors(plain)} == set(SHAPES)


def test_some_keys(plain: Path) -> None:
    assert list(read_tensors(plain, ["output_layer.weight"])) == ["output_layer.weight"]


def test_an_absent_key_is_named(plain: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        read_tensors(plain, ["output_layer.weight", "output_layer.bias"])
    assert str(caught.value).startswith(
        f"{plain}: output_layer.bias: found no such parameter in the checkpoint, "
        "expected one of 12 keys such as decoder.final_layernorm.weight, "
    )


def test_optimizer_and_extra_state_do_not_exist_for_the_reader(plain: Path) -> None:
    known = SafeReader(plain).read_metadata().state_dict_metadata
    assert set(known) == set(SHAPES)
    assert len(FileSystemReader(plain).read_metadata().state_dict_metadata) > 90


def rewrite(directory: Path, change: Callable[[Metadata], object]) -> Path:
    """Change a checkpoint's table through torch's own classes."""
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    path = directory / ".metadata"
    path.write_bytes(pickle.dumps(metadata))
    return path


def first_of(metadata: Metadata, key: str = "output_layer.weight") -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == key)


@pytest.mark.parametrize(
    "name", ["../iter_0000085/__0_0.distcp", "/etc/passwd", "a/../../b", "..\\b", "", "a\0b", 3]
)
def test_a_path_that_leaves_the_directory_is_refused(broken_plain: Path, name: Any) -> None:
    def escape(metadata: Metadata) -> None:
        metadata.storage_data[first_of(metadata)].relative_path = name

    path = rewrite(broken_plain, escape)
    with pytest.raises(SnapshotError) as caught:
        read_tensors(broken_plain)
    assert str(caught.value) == (
        f"{path}: relative_path: found {name!r}, expected the name of a file inside the snapshot. "
        "Nothing was read from there. Do not load this checkpoint with other tools."
    )
    with pytest.raises(SnapshotError, match="relative_path"):
        SafeReader(broken_plain).read_metadata()


def test_an_escape_of_another_entry_is_refused_too(broken_plain: Path) -> None:
    def escape(metadata: Metadata) -> None:
        index = next(i for i in metadata.storage_data if "_extra_state" in i.fqn)
        metadata.storage_data[index].relative_path = "../elsewhere"

    rewrite(broken_plain, escape)
    with pytest.raises(SnapshotError, match=r"relative_path: found '\.\./elsewhere'"):
        read_tensors(broken_plain)


def test_a_missing_rank_file_is_named(broken_plain: Path) -> None:
    (broken_plain / "__1_0.distcp").unlink()
    with pytest.raises(IncompleteSnapshotError, match=r"__1_0\.distcp: found no such file"):
        read_tensors(broken_plain)


def test_a_rank_file_cut_short_is_named(broken_plain: Path) -> None:
    path = broken_plain / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(IncompleteSnapshotError, match=r"__0_0\.distcp: found 1000 bytes, expected"):
        read_tensors(broken_plain)


def shrink_size(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata["output_layer.weight"]
    assert isinstance(described, TensorStorageMetadata)
    described.size = torch.Size([127, 64])


def drop_chunk(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata[f"{LAYERS}.mlp.router.weight"]
    assert isinstance(described, TensorStorageMetadata)
    described.chunks.pop()


def drop_fragment(metadata: Metadata) -> None:
    del metadata.storage_data[first_of(metadata)]


def swap_fragments(metadata: Metadata) -> None:
    one = first_of(metadata)
    other = first_of(metadata, "decoder.final_layernorm.weight")
    stored = metadata.storage_data
    stored[one], stored[other] = stored[other], stored[one]


def other_dtype(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata["output_layer.weight"]
    assert isinstance(described, TensorStorageMetadata)
    described.properties.dtype = torch.bfloat16


def compress(metadata: Metadata) -> None:
    metadata.storage_data[first_of(metadata)].transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shrink_size, "chunks that do not tile it"),
        (drop_chunk, "chunks that do not tile it"),
        (drop_fragment, "is stored nowhere"),
        (swap_fragments, r"found float32 \[64\], expected float32 \[128, 64\]"),
        (other_dtype, r"found float32 \[128, 64\], expected bfloat16 \[128, 64\]"),
        (compress, "stored through"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(
    broken_plain: Path, change: Callable[[Metadata], None], text: str
) -> None:
    rewrite(broken_plain, change)
    with pytest.raises(SnapshotError, match=text):
        read_tensors(broken_plain, ["output_layer.weight", "decoder.final_layernorm.weight"])


def test_overlapping_chunks_are_refused(broken_plain: Path) -> None:
    key = f"{LAYERS}.mlp.experts.experts.linear_fc1.weight"  # gate and up halves of 32 rows

    def overlap(metadata: Metadata) -> None:
        described = metadata.state_dict_metadata[key]
        assert isinstance(described, TensorStorageMetadata)
        index = next(i for i in metadata.storage_data if i.fqn == key and i.offset[2] == 32)
        moved = torch.Size([*index.offset[:2], 16, 0])
        next(c for c in described.chunks if c.offsets == index.offset).offsets = moved
        metadata.storage_data[MetadataIndex(key, moved)] = metadata.storage_data.pop(index)

    rewrite(broken_plain, overlap)
    with pytest.raises(SnapshotError) as caught:
        read_tensors(broken_plain, [key])
    assert str(caught.value) == (
        f"{broken_plain}: {key}: found overlapping chunks, expected chunks that tile it"
    )
