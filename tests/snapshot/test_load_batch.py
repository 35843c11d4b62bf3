"""A rank's batch with its routes, as AXRL wrote it and as variants of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError, IncompleteSnapshotError, SnapshotError
from replay_lib.snapshot import (
    Content,
    MergedRow,
    load_batch,
    load_grad_info,
    open_snapshot,
    payload_counts,
)
from replay_lib.snapshot.naming import Call, Instance, named, save_named


def test_columns_of_the_plain_batch(plain: Path) -> None:
    batch = load_batch(open_snapshot(plain), 1)
    assert (batch.dp_rank, batch.rows, batch.width) == (1, 7, 128)
    assert batch.index.tolist() == [-1, 16, 21, 19, 20, 15, 23]
    assert batch.lengths() == [4, 10, 22, 24, 21, 14, 21]
    dtypes = {
        torch.int64: ("input_ids", "labels", "position_ids", "turn_index", "trajectory_id"),
        torch.bool: ("loss_mask", "attention_mask"),
        torch.float32: ("advantage", "old_logprobs", "ref_logprobs", "rollout_logprobs", "reward"),
    }
    for dtype, names in dtypes.items():
        assert {batch.column(name).dtype for name in names} == {dtype}
    assert batch.teacher_logprobs is None
    assert batch.merge_info is None


def test_labels_are_the_next_token_where_trainable(plain: Path) -> None:
    batch = load_batch(open_snapshot(plain), 0)
    mask = batch.loss_mask[:, :-1]
    assert bool(mask.any())
    assert torch.equal(batch.labels[:, :-1][mask], batch.input_ids[:, 1:][mask])
    assert not batch.loss_mask[batch.labels == -100].any()


def test_routes_have_a_row_for_each_token_but_the_last(plain: Path) -> None:
    snapshot = open_snapshot(plain)
    assert payload_counts(snapshot) == {0: 15, 1: 11}
    for dp_rank in (0, 1):
        batch = load_batch(snapshot, dp_rank)
        shapes = [None if r is None else tuple(r.shape) for r in batch.routes]
        assert shapes == [(n - 1, 4, 2) for n in batch.lengths()]
        assert all(r is not None and r.dtype == torch.int16 for r in batch.routes)
        assert all(int(r.min()) >= 0 and int(r.max()) < 8 for r in batch.routes if r is not None)


def test_padding_rows_have_the_placeholder_routes(plain: Path) -> None:
    batch = load_batch(open_snapshot(plain), 1)
    route = batch.routes[0]
    assert route is not None
    assert torch.equal(route, torch.tensor([0, 1], dtype=torch.int16).expand(3, 4, 2))


def test_merged_rows_are_read_and_marked(merged: Path) -> None:
    batch = load_batch(open_snapshot(merged), 1)
    assert batch.routes == (None, None)
    assert batch.merge_info is not None
    row = batch.merge_info[0]
    assert isinstance(row, MergedRow) and row.tree is not None
    assert all(r.shape[1:] == (4, 2) for r in row.path_routes)
    lengths = [n - 1 for n in row.tree["turn_sample_lens"]]
    assert [len(r) for r in row.path_routes] == lengths
    assert row.tree["nodes"][0] == {"start": 0, "end": row.tree["nodes"][0]["end"], "parent": -1}
    sources = row.tree["routing_source_path"]
    assert isinstance(sources, torch.Tensor)
    assert len(sources) == row.tree["real_total"] - 1 == batch.lengths()[0] - 1


def test_grad_info_is_by_global_rank(plain: Path, broken_plain: Path) -> None:
    figures = load_grad_info(open_snapshot(plain), 1)
    assert len(figures) == 95
    assert set(figures["module.embedding.word_embeddings.weight"]) == {
        "grad_norm",
        "grad_max",
        "param_norm",
    }
    (broken_plain / "grad_info_rank1.pt").unlink()
    with pytest.raises(IncompleteSnapshotError, match=r"grad_info_rank1\.pt: found no such file"):
        load_grad_info(open_snapshot(broken_plain), 1)


def write_raw(directory: Path, **columns: Any) -> Path:
    """Replace rank 0's batch by these columns (two rows of four tokens), as tensordict would."""
    full: dict[str, Any] = {
        "index": torch.arange(2),
        "input_ids": torch.ones(2, 4, dtype=torch.int64),
        "labels": torch.full((2, 4), -100),
        "loss_mask": torch.zeros(2, 4, dtype=torch.bool),
        "attention_mask": torch.ones(2, 4, dtype=torch.bool),
        "advantage": torch.zeros(2, 4),
        **columns,
    }
    state = {"_tensordict": {k: v for k, v in full.items() if v is not ...}}
    path = directory / "batch_rank0.pt"
    save_named(Instance(named("axrl.data.sample.SampleTensorDict"), state), path)
    return path


def handle(ref: Any, start: int = 0, count: int | None = None) -> Instance:
    state = {"ref": ref, "row_start": start, "row_count": count}
    return Instance(named("axrl.utils.tensor_store.TensorHandle"), state)


def non_tensor(state: dict[str, Any], name: str = "NonTensorData") -> Instance:
    return Instance(named(f"tensordict.tensorclass.{name}"), state)


def write_payload(directory: Path, *arrays: Any) -> None:
    save_named([a.numpy() for a in arrays], directory / "routing_payload_rank0.pt")


def routes_of(start: int, rows: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    return (start + torch.arange(rows)).reshape(rows, 1, 1).expand(rows, 1, 2).to(dtype).clone()


def load(directory: Path) -> RankBatch:
    return load_batch(open_snapshot(directory), 0)


def test_handles_are_tied_in_first_seen_order(broken_plain: Path) -> None:
    first, second, view = handle("a"), handle("b"), handle("a", 0, 1)
    rows = [[[second, view]], [[first]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(20, 2), routes_of(10, 1), routes_of(10, 3))
    batch = load(broken_plain)
    assert [r[:, 0, 0].tolist() for r in batch.routes if r is not None] == [
        [20, 21, 10],  # handles of one path are joined
        [10, 11, 12],
    ]


def test_a_payload_is_not_sliced_again(broken_plain: Path) -> None:
    rows = [[[handle("a", 5, 3)]], [[handle("a", 5, 3)]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(5, 3))
    routes = load(broken_plain).routes
    assert [r[:, 0, 0].tolist() for r in routes if r is not None] == [[5, 6, 7], [5, 6, 7]]


def test_rows_without_handles_have_no_routes(broken_plain: Path) -> None:
    rows = [None, [[handle("a")]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(0, 3))
    routes = load(broken_plain).routes
    assert routes[0] is None
    assert routes[1] is not None


def test_an_empty_array_is_read(broken_plain: Path) -> None:
    rows = [[[handle("a", 0, 0), handle("b")]], [[]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(0, 0), routes_of(7, 3))
    routes = load(broken_plain).routes
    assert [None if r is None else tuple(r.shape) for r in routes] == [(3, 1, 2), (0, 1, 2)]


def test_several_paths_without_a_tree_are_marked(broken_plain: Path) -> None:
    rows = [[[handle("a")], [handle("b")]], [[handle("a")]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(0, 3), routes_of(10, 3))
    batch = load(broken_plain)
    assert batch.merge_info is not None
    assert batch.merge_info[1] is None
    assert batch.merge_info[0].tree is None
    assert [int(r[0, 0, 0]) for r in batch.merge_info[0].path_routes] == [0, 10]
    assert batch.routes[0] is None and batch.routes[1] is not None


@pytest.mark.parametrize("name", ["ray.ObjectRef", "ray._raylet.ObjectRef"])
def test_object_refs_of_old_and_new_ray(broken_plain: Path, name: str) -> None:
    same = [handle(Call(named(name), (b"\x01" * 28,))) for _ in range(2)]
    rows = [[[same[0]]], [[same[1]]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(0, 3))
    assert all(r is not None for r in load(broken_plain).routes)


LAYOUTS = {
    "0.15": lambda rows: non_tensor({"tensordict": None, "non_tensordict": {"data": rows}}),
    "private": lambda rows: non_tensor({"_tensordict": {}, "_non_tensordict": {"data": rows}}),
    "nested": lambda rows: non_tensor({"a": {"b": {"data": non_tensor({"data": rows})}}}),
    "row by row": lambda rows: non_tensor({"data": [non_tensor({"data": r}) for r in rows]}),
    "stack": lambda rows: non_tensor(
        {"tensordicts": [non_tensor({"data": r}) for r in rows]}, "NonTensorStack"
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrappers_of_other_tensordict_versions(broken_plain: Path, layout: str) -> None:
    rows = [[[handle("a")]], [[handle("b")]]]
    write_raw(broken_plain, routing_handles_per_path=LAYOUTS[layout](rows))
    write_payload(broken_plain, routes_of(0, 3), routes_of(10, 3))
    assert [int(r[0, 0, 0]) for r in load(broken_plain).routes if r is not None] == [0, 10]


def test_a_plain_tensordict_is_read(broken_plain: Path) -> None:
    write_raw(broken_plain)
    (broken_plain / "routing_payload_rank0.pt").unlink()
    metadata = broken_plain / "axrl_metadata.json"
    metadata.write_text(metadata.read_text().replace('rank0": 15', 'rank0": 0'))
    columns = {
        "index": torch.arange(1),
        "input_ids": torch.ones(1, 2, dtype=torch.int64),
        "labels": torch.ones(1, 2, dtype=torch.int64),
        "loss_mask": torch.ones(1, 2, dtype=torch.bool),
        "attention_mask": torch.ones(1, 2, dtype=torch.bool),
        "advantage": torch.ones(1, 2),
    }
    kind, make = named("tensordict._td.TensorDict"), named("tensordict._reductions._make_td")
    save_named(Call(make, (kind, {"_tensordict": columns})), broken_plain / "batch_rank0.pt")
    batch = load(broken_plain)
    assert (batch.rows, batch.routes) == (1, (None,))


def test_another_number_of_payloads_is_refused_with_both_counts(broken_plain: Path) -> None:
    rows = [[[handle("a")]], [[handle("b")]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(0, 3))
    with pytest.raises(BatchError) as caught:
        load(broken_plain)
    assert str(caught.value) == (
        f"{broken_plain / 'routing_payload_rank0.pt'}: found 1 routing payloads, expected one for "
        "each of the batch's 2 distinct handles. The two files are not of the same step: copy "
        "both again."
    )


def test_handles_without_a_payload_file_are_incomplete(broken_plain: Path) -> None:
    (broken_plain / "routing_payload_rank1.pt").unlink()
    snapshot = open_snapshot(broken_plain)  # rank 1 might have had no handles
    with pytest.raises(IncompleteSnapshotError) as caught:
        load_batch(snapshot, 1)
    text = "routing_payload_rank1.pt: found no such file, expected payloads of the batch's 11"
    assert text in str(caught.value)


INT16 = [torch.int16, torch.int32, torch.int64, torch.uint16]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, *INT16])
def test_routes_become_int16_but_narrower_ones_keep_the_dtype_that_may_have_wrapped_them(
    broken_plain: Path, dtype: torch.dtype
) -> None:
    rows = [[[handle("a")]], None]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(3, 3).to(dtype))
    route = load(broken_plain).routes[0]
    assert route is not None and route.dtype == (torch.int16 if dtype in INT16 else dtype)
    assert route[:, 0, 0].tolist() == [3, 4, 5]


def test_payloads_of_different_dtype_are_refused(broken_plain: Path) -> None:
    """Joined, they would be int16, and nobody could tell that some ids may have wrapped."""
    rows = [[[handle("a")]], [[handle("b")]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(0, 3), routes_of(0, 3, torch.int8))
    text = r"entry 1: found torch.int8, expected torch.int16 as in entry 0"
    with pytest.raises(BatchError, match=text):
        load(broken_plain)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (torch.full((3, 1, 2), 40000), "found ids from 40000 to 40000, beyond int16"),
        (torch.zeros(3, 1, 2), r"found float32 \[3, 1, 2\]"),
        (torch.zeros(3, 2, dtype=torch.int16), r"found int16 \[3, 2\]"),
        (torch.zeros(3, 1, 2, dtype=torch.bool), r"dtype 'b1'|found bool"),
    ],
)
def test_a_payload_that_is_no_route_is_refused(
    broken_plain: Path, array: torch.Tensor, text: str
) -> None:
    rows = [[[handle("a")]], None]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, array)
    with pytest.raises(BatchError, match=rf"routing_payload_rank0\.pt: entry 0: .*({text})"):
        load(broken_plain)


def test_payloads_of_different_shape_are_refused(broken_plain: Path) -> None:
    rows = [[[handle("a")]], [[handle("b")]]]
    write_raw(broken_plain, routing_handles_per_path=non_tensor({"data": rows}))
    write_payload(broken_plain, routes_of(0, 3), torch.zeros(3, 2, 2, dtype=torch.int16))
    text = r"entry 1: found \[3, 2, 2\], expected \[rows, 1, 2\] as in entry 0"
    with pytest.raises(BatchError, match=text):
        load(broken_plain)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"advantage": ...}, "advantage: found no such column, expected a column that every"),
        ({"loss_mask": torch.ones(2, 4)}, "loss_mask: found float32 [2, 4], expected bool [2, 4]"),
        ({"labels": torch.ones(2, 3).long()}, "labels: found int64 [2, 3], expected int64 [2, 4]"),
        ({"old_logprobs": None}, "old_logprobs: found a NoneType, expected float32 [2, 4]"),
        ({"input_ids": torch.ones(2).long()}, "input_ids: found int64 [2], expected int64 [B, T]"),
        ({"reward": torch.ones(2, 1)}, "reward: found float32 [2, 1], expected float32 [2]"),
        (
            {"attention_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()},
            "attention_mask of row 1: found a hole, expected real tokens first, then padding",
        ),
    ],
)
def test_a_wrong_column_is_named(broken_plain: Path, columns: dict[str, Any], text: str) -> None:
    rows = [[[handle("a")]], None]
    data = non_tensor({"data": rows})
    path = write_raw(broken_plain, routing_handles_per_path=data, **columns)
    write_payload(broken_plain, routes_of(0, 3))
    with pytest.raises(BatchError) as caught:
        load(broken_plain)
    assert f"{path}: {text}" in str(caught.value)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (non_tensor({"data": [None]}), "1 items for 2 rows"),
        (non_tensor({"other": 1}), "a non-tensor column without data"),
        (non_tensor({"data": [[["x"]], None]}), "a str where a handle belongs"),
        (non_tensor({"data": [[[handle("a", "x")]], None]}), "a handle with rows 'x' and None"),  # type: ignore[arg-type]
        (non_tensor({"data": [3, None]}), "'int' object is not iterable"),
    ],
)
def test_handles_that_make_no_sense_are_refused(broken_plain: Path, column: Any, text: str) -> None:
    path = write_raw(broken_plain, routing_handles_per_path=column)
    with pytest.raises(SnapshotError) as caught:
        load(broken_plain)
    assert str(caught.value) == (
        f"{path}: routing_handles_per_path: found {text}, expected handles or trees for each row"
    )


def test_a_dp_rank_beyond_the_run_is_refused(plain: Path) -> None:
    with pytest.raises(ValueError, match="dp rank 2 of a snapshot with dp=2"):
        load_batch(open_snapshot(plain), 2)


def test_content_is_frozen(content: Content) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        content.step = 1  # type: ignore[misc]
