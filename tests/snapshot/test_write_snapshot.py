"""Writing the trainer's layout: round trips, variants, all or nothing."""

from __future__ import annotations

import dataclasses
import json
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.errors import BatchError, SnapshotError
from replay_lib.snapshot import (
    Content,
    MergedRow,
    SavedHandle,
    Snapshot,
    load_batch,
    load_handles,
    object_ref,
    open_snapshot,
    payload_counts,
    read_content,
    write_snapshot,
)


def assert_same_batch(one: RankBatch, other: RankBatch) -> None:
    for name in (*TOKEN_COLUMNS, *ROW_COLUMNS):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), name
    assert len(one.routes) == len(other.routes) == one.rows
    for left, right in zip(one.routes, other.routes, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


def assert_same_content(one: Content, other: Content) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for key, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[key]), key
    for left, right in zip(one.batches, other.batches, strict=True):
        assert_same_batch(left, right)
    plain = ("step", "grad_norm_preclip", "grad_norm_median", "worker_config", "run_config")
    for name in (*plain, "settings", "grad_info"):
        assert getattr(one, name) == getattr(other, name), name


def globals_of(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        program = archive.read(name)
    return {str(arg) for op, arg, _ in pickletools.genops(program) if op.name == "GLOBAL"}


def write(tmp_path: Path, content: Content, **options: Any) -> Snapshot:
    return write_snapshot(tmp_path / "out" / "iter_0000085", content, **options)


@pytest.mark.parametrize("legacy", [False, True])
def test_what_is_written_reads_back(tmp_path: Path, content: Content, legacy: bool) -> None:
    snapshot = write(tmp_path, content, legacy=legacy)
    assert snapshot.legacy == legacy
    assert_same_content(content, read_content(snapshot))


def test_metadata_is_the_trainers(tmp_path: Path, content: Content, plain: Path) -> None:
    kept = read_content(open_snapshot(plain), keep_handles=True)
    snapshot = write(tmp_path, kept)
    for name in ("axrl_metadata.json", "megatron_worker_config.json", "metadata.json"):
        ours, theirs = ((p / name).read_text() for p in (snapshot.path, plain))
        assert list(json.loads(ours)) == list(json.loads(theirs)), name
        assert json.loads(ours) == json.loads(theirs), name
    ours, theirs = ({p.name for p in d.iterdir()} for d in (snapshot.path, plain))
    assert ours == theirs - {"__1_0.distcp"}


def test_pickles_name_what_the_trainers_name(tmp_path: Path, content: Content, plain: Path) -> None:
    snapshot = write(tmp_path, content)
    names = [p.name for p in plain.glob("*.pt")]
    assert len(names) == 9
    for name in names:
        assert globals_of(snapshot.path / name) == globals_of(plain / name), name


def test_the_spread_over_objects_is_kept_on_request(
    tmp_path: Path, content: Content, plain: Path
) -> None:
    original = open_snapshot(plain)
    kept = write(tmp_path, read_content(original, keep_handles=True))
    assert payload_counts(kept) == payload_counts(original) == {0: 15, 1: 11}
    for dp_rank in (0, 1):
        before, after = load_handles(original, dp_rank), load_handles(kept, dp_rank)
        assert before[0] == after[0]
        assert_same_batch(load_batch(original, dp_rank), load_batch(kept, dp_rank))
    simple = write_snapshot(tmp_path / "simple" / "iter_0000085", content)
    assert payload_counts(simple) == {0: 7, 1: 7}


def test_merged_rows_survive(tmp_path: Path, merged: Path) -> None:
    content = read_content(open_snapshot(merged))
    again = read_content(write(tmp_path, content))
    for before, after in zip(content.batches, again.batches, strict=True):
        assert before.merge_info is not None and after.merge_info is not None
        for left, right in zip(before.merge_info, after.merge_info, strict=True):
            assert_same_row(left, right)


def assert_same_row(left: MergedRow, right: MergedRow) -> None:
    assert all(map(torch.equal, left.path_routes, right.path_routes))
    assert left.tree is not None and right.tree is not None
    assert left.tree.keys() == right.tree.keys()
    for key, value in left.tree.items():
        other = right.tree[key]
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, key


def with_worker(content: Content, **changes: Any) -> Content:
    return dataclasses.replace(content, worker_config={**content.worker_config, **changes})


def test_static_micro_batches(tmp_path: Path, content: Content) -> None:
    static = with_worker(content, use_dynamic_batch_size=False, train_micro_batch_size=3)
    worker = write(tmp_path, static).worker
    assert (worker.use_dynamic_batch_size, worker.train_micro_batch_size) == (False, 3)


@pytest.mark.parametrize("name", ["turn_index", "rollout_logprobs", "ref_logprobs", "reward"])
def test_an_absent_optional_column_is_absent(tmp_path: Path, content: Content, name: str) -> None:
    batches = tuple(b.replace(**{name: None}) for b in content.batches)
    snapshot = write(tmp_path, dataclasses.replace(content, batches=batches))
    assert getattr(load_batch(snapshot, 0), name) is None


def test_padding_rows_anywhere(tmp_path: Path, content: Content) -> None:
    order = [3, 0, 6, 5, 1, 2, 4]
    batches = (content.batches[0], content.batches[1].select(order))
    snapshot = write(tmp_path, dataclasses.replace(content, batches=batches))
    assert load_batch(snapshot, 1).index.tolist() == [19, -1, 23, 15, 16, 21, 20]
    assert_same_batch(load_batch(snapshot, 1), batches[1])


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_data_parallel_sizes(tmp_path: Path, content: Content, ranks: int) -> None:
    batches = tuple(content.batches[d % 2].replace(dp_rank=d) for d in range(ranks))
    sized = dataclasses.replace(with_worker(content, dp_size=ranks), batches=batches, grad_info={})
    snapshot = write(tmp_path, sized)
    assert [f.rank for f in snapshot.dp_rank_files] == list(range(ranks))
    for dp_rank, batch in enumerate(batches):
        assert_same_batch(load_batch(snapshot, dp_rank), batch)


def test_ranks_of_one_group_save_the_same_batch(tmp_path: Path, content: Content) -> None:
    snapshot = write(tmp_path, with_worker(content, tp_size=2, pp_size=2))
    assert snapshot.parallel.world_size == 8
    assert [f.rank for f in snapshot.dp_rank_files] == [0, 2]
    assert len(list(snapshot.path.glob("batch_rank*.pt"))) == 8
    for dp_rank in (0, 1):
        assert_same_batch(load_batch(snapshot, dp_rank), content.batches[dp_rank])


def test_a_batch_without_routes_has_no_payload_file(tmp_path: Path, content: Content) -> None:
    batches = tuple(b.replace(routes=()) for b in content.batches)
    snapshot = write(tmp_path, dataclasses.replace(content, batches=batches))
    assert snapshot.routing_payload_count_rank0 == 0
    assert not list(snapshot.path.glob("routing_payload*"))
    assert load_batch(snapshot, 0).routes == (None,) * 7


def test_some_rows_without_routes(tmp_path: Path, content: Content) -> None:
    first = content.batches[0]
    routes = (None, *first.routes[1:])
    batches = (first.replace(routes=routes), content.batches[1])
    snapshot = write(tmp_path, dataclasses.replace(content, batches=batches))
    assert_same_batch(load_batch(snapshot, 0), batches[0])


def test_rows_that_share_a_route_tensor_share_an_object(tmp_path: Path, content: Content) -> None:
    first = content.batches[0]
    routes = (first.routes[0], first.routes[0], *first.routes[2:])
    batches = (first.replace(routes=routes), content.batches[1])
    snapshot = write(tmp_path, dataclasses.replace(content, batches=batches))
    assert payload_counts(snapshot)[0] == 6


def rows_of(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.int16).reshape(-1, 1, 1).expand(-1, 4, 2)


def test_views_several_handles_and_several_paths(tmp_path: Path, content: Content) -> None:
    one, two = object_ref("one"), object_ref("two")
    whole = SavedHandle(ref=one, rows=rows_of(0, 4))
    view = SavedHandle(ref=one, rows=rows_of(1, 2), row_start=1, row_count=2)
    other = SavedHandle(ref=two, rows=rows_of(50, 3))
    spread = (((whole, other),), ((view,), (whole,)), None, ((other,),))
    batch = content.batches[0].select([0, 1, 2, 3])
    single = dataclasses.replace(
        with_worker(content, dp_size=1), batches=(batch,), handles=(spread,), grad_info={}
    )
    snapshot = write(tmp_path, single)
    assert payload_counts(snapshot) == {0: 3}
    again = load_batch(snapshot, 0)
    joined, several, none, last = again.routes
    assert joined is not None and joined[:, 0, 0].tolist() == [0, 1, 2, 3, 50, 51, 52]
    assert several is None and none is None
    assert last is not None and len(last) == 3
    assert again.merge_info is not None and again.merge_info[1].tree is None
    assert [r[:, 0, 0].tolist() for r in again.merge_info[1].path_routes] == [[1, 2], [0, 1, 2, 3]]


def test_bfloat16_parameters(tmp_path: Path, content: Content) -> None:
    tensors = {key: tensor.bfloat16() for key, tensor in content.tensors.items()}
    snapshot = write(tmp_path, dataclasses.replace(content, tensors=tensors))
    assert_same_content(
        read_content(snapshot), dataclasses.replace(content, tensors=tensors, handles=None)
    )


@pytest.mark.parametrize(
    ("norm", "median", "ratio"),
    [(None, 2.0, None), (8.0, None, None), (8.0, 0.0, None), (8.0, 2.0, 4.0)],
)
def test_a_ratio_needs_a_median(
    tmp_path: Path, content: Content, norm: float | None, median: float | None, ratio: float | None
) -> None:
    norms = dataclasses.replace(content, grad_norm_preclip=norm, grad_norm_median=median)
    snapshot = write(tmp_path, norms)
    assert (snapshot.grad_norm_preclip, snapshot.grad_norm_median) == (norm, median)
    assert snapshot.spike_ratio_recorded == ratio


def test_an_existing_directory_is_left_alone(tmp_path: Path, content: Content) -> None:
    target = tmp_path / "iter_0000085"
    target.mkdir()
    with pytest.raises(SnapshotError) as caught:
        write_snapshot(target, content)
    assert str(caught.value) == f"{target}: found a directory that exists, expected a new name"
    assert not list(target.iterdir())


def test_batches_must_fit_the_layout(tmp_path: Path, content: Content) -> None:
    with pytest.raises(SnapshotError, match="batches: found 2, expected dp_size = 3"):
        write(tmp_path, with_worker(content, dp_size=3))


class _Unreadable(Mapping[str, Any]):
    """Fails when the writer is halfway through."""

    def __getitem__(self, key: str) -> Any:
        raise KeyboardInterrupt

    def __iter__(self) -> Any:
        raise KeyboardInterrupt

    def __len__(self) -> int:
        return 1


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, content: Content) -> None:
    halfway = dataclasses.replace(content, grad_info={0: _Unreadable()})
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, halfway)
    assert not list((tmp_path / "out").iterdir())


def test_one_object_with_two_contents_is_refused(tmp_path: Path, content: Content) -> None:
    ref = object_ref("same")
    spread = tuple(((SavedHandle(ref=ref, rows=rows_of(n, 3)),),) for n in range(7))
    with pytest.raises(BatchError, match="two sets of routes"):
        write(tmp_path, dataclasses.replace(content, handles=(spread, spread)))


def test_torchs_own_reader_takes_the_checkpoint(tmp_path: Path, content: Content) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(write(tmp_path, content).path).read_metadata()
    assert set(metadata.state_dict_metadata) == set(content.tensors)
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == "iter_0000085"
