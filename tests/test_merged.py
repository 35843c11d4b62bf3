"""Prefix trees: read from what a batch holds, and refused by row and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tree_shapes import (
    FOREST,
    ONE_BRANCH,
    PREFIX,
    SHAPES,
    SINGLE,
    TWICE,
    Shape,
    merged_batch,
    merged_row,
    stored_tree,
)

from replay_lib.errors import BatchError
from replay_lib.merged import (
    MergedRow,
    PrefixTree,
    differing_routes,
    merged_routes,
    training_paths,
)
from replay_lib.snapshot import load_batch, open_snapshot
from replay_lib.tree_check import checked_tree

MERGED = Path(__file__).parent / "data" / "snap" / "merged" / "iter_0000085"


def check(shape: Shape, *, routes: bool = True, **changes: Any) -> PrefixTree:
    tree = stored_tree(shape) | changes
    row = MergedRow(path_routes=(), tree=tree)
    return checked_tree(row, length=shape.real, width=40, where="row 3", routes=routes)


@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_has_the_paths_and_positions_of_its_shape(name):
    shape = SHAPES[name]
    tree = check(shape)
    paths = shape.paths()
    assert [tree.path(p).tolist() for p in range(len(paths))] == paths
    positions = tree.positions().tolist()
    assert len(positions) == shape.total
    for path in paths:
        assert [positions[place] for place in path] == list(range(len(path)))
    assert positions[shape.real :] == [
        positions[shape.real - 1] + i + 1 for i in range(shape.total - shape.real)
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_each_token_trains_in_the_path_that_the_trainer_chose(name):
    shape = SHAPES[name]
    batch = merged_batch([shape], vocab=50, layers=1, experts=4, topk=2, width=40)
    chosen = training_paths(check(shape), batch.input_ids[0], batch.labels[0]).tolist()
    paths = shape.paths()
    for path, tokens in shape.trained.items():
        # a token with no source (the first of the row) is in the first path that goes on so
        assert all(chosen[paths[path][t]] == path for t in tokens if paths[path][t] > 0)
    for place, path in enumerate(chosen):
        assert place in paths[path]


def test_without_sources_a_token_trains_where_its_label_follows():
    batch = merged_batch([PREFIX], vocab=50, layers=1, experts=4, topk=2, width=40)
    tree = check(PREFIX, routes=False, routing_source_path=None, routing_source_read_pos=None)
    assert tree.sources is None
    labels = batch.labels[0].clone()
    labels[2] = batch.input_ids[0, 7]  # behind the shared prefix the third path goes on
    chosen = training_paths(tree, batch.input_ids[0], labels)
    assert int(chosen[2]) == 2
    assert chosen[:2].tolist() == [0, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_has_the_route_that_it_has_in_each_of_its_paths(name):
    shape = SHAPES[name]
    routes_TLK = torch.arange(shape.total, dtype=torch.int16)[:, None, None].expand(-1, 2, 3)
    row = merged_row(shape, routes_TLK)
    tree = checked_tree(row, length=shape.real, width=40, where="row 3", routes=True)
    composed = merged_routes(tree, row.path_routes)
    assert composed.shape == (shape.real - 1, 2, 3)
    followed = {place for path in shape.paths() for place in path[:-1]}
    assert all(bool((composed[place] == place).all()) for place in followed)
    assert differing_routes(tree, row.path_routes) == 0


def test_a_new_root_leaves_the_trainers_own_row_at_the_leaf_before_it():
    routes_TLK = torch.arange(FOREST.total, dtype=torch.int16)[:, None, None].expand(-1, 1, 2)
    row = merged_row(FOREST, routes_TLK)
    tree = checked_tree(row, length=FOREST.real, width=40, where="row 3", routes=True)
    # token 10 ends a leaf; the path of token 11 has its last route at token 15
    assert merged_routes(tree, row.path_routes)[10, 0].tolist() == [15, 15]


def test_paths_that_disagree_about_a_shared_token_are_counted():
    routes_TLK = torch.zeros(TWICE.total, 2, 3, dtype=torch.int16)
    row = merged_row(TWICE, routes_TLK)
    row.path_routes[2][5:7] += 1  # tokens 5 and 6 of the third path, both shared with the second
    tree = checked_tree(row, length=TWICE.real, width=40, where="row 3", routes=True)
    # token 5's successor is the second path's, so the third path's own two routes differ
    assert differing_routes(tree, row.path_routes) == 2


def test_the_trees_of_the_example_are_whole():
    for rank, counts in ((0, [1, 4]), (1, [3, 4])):
        batch = load_batch(open_snapshot(MERGED), rank)
        assert batch.merge_info is not None
        for row, (merged, length) in enumerate(zip(batch.merge_info, batch.lengths(), strict=True)):
            assert merged is not None
            tree = checked_tree(merged, length=length, width=batch.width, where="", routes=True)
            assert len(tree.lengths) == counts[row]
            assert batch.position_ids is not None
            assert torch.equal(tree.positions(), batch.position_ids[row, : tree.total])
            assert differing_routes(tree, merged.path_routes) == 0


def source(shape: Shape, which: str, place: int, value: int) -> dict[str, Any]:
    tensor = stored_tree(shape)[which].clone()
    tensor[place] = value
    return {which: tensor}


def ranges(shape: Shape, which: str, place: int, value: tuple[int, int]) -> dict[str, Any]:
    changed = list(stored_tree(shape)[which])
    changed[place] = value
    return {which: changed}


def node(shape: Shape, number: int, **fields: Any) -> dict[str, Any]:
    nodes = stored_tree(shape)["nodes"]
    nodes[number] |= fields
    return {"nodes": nodes}


BROKEN: list[tuple[str, Shape, dict[str, Any], str]] = [
    ("no total", TWICE, {"total_padded": None}, "total_padded: found NoneType, expected a whole"),
    ("a true total", TWICE, {"total_padded": True}, "total_padded: found True, expected a whole"),
    ("wider than the row", TWICE, {"total_padded": 41}, "real_total: found 19 of 41"),
    ("another length", TWICE, {"real_total": 18}, "real_total: found 18 of 32 (total_padded)"),
    ("no nodes", TWICE, {"nodes": []}, "nodes: found [], expected a list of nodes"),
    ("a node of text", TWICE, {"nodes": ["x"]}, "nodes[0]: found str, expected start, end and"),
    (
        "a gap",
        TWICE,
        node(TWICE, 1, start=5),
        "nodes[1]: found tokens 5 to 7, expected",
    ),
    ("an empty node", TWICE, node(TWICE, 4, end=14), "nodes[4]: found tokens 14 to 14"),
    ("an early end", TWICE, node(TWICE, 4, end=20), "nodes: found an end at 20, expected 32"),
    ("its own parent", TWICE, node(TWICE, 2, parent=2), "nodes[2]: found parent 2, expected -1 or"),
    ("a low parent", TWICE, node(TWICE, 2, parent=-2), "nodes[2]: found parent -2"),
    ("no path", TWICE, {"path_to_leaf": []}, "path_to_leaf: found no path, expected one or more"),
    ("a leaf too high", TWICE, {"path_to_leaf": [(5, 0)]}, "path_to_leaf[0]: found node 5"),
    ("a leaf of text", TWICE, {"path_to_leaf": ["ab"]}, "path_to_leaf[0]: found str, expected 2"),
    ("another prefix", TWICE, {"path_to_leaf": [(1, 3)]}, "path_to_leaf[0]: found 3 tokens before"),
    ("a length missing", TWICE, {"turn_sample_lens": [7, 11]}, "turn_sample_lens: found 2 lengths"),
    (
        "a path past its leaf",
        TWICE,
        {"turn_sample_lens": [8, 11, 13]},
        "turn_sample_lens[0]: found 8 tokens, expected 5 to 7, an end in node 1",
    ),
    (
        "a path into padding",
        TWICE,
        {"turn_sample_lens": [7, 11, 14]},
        "turn_sample_lens: found token 19 on a path, expected paths over tokens 0 to 18 exactly",
    ),
    (
        "a token on no path",
        TWICE,
        {"turn_sample_lens": [6, 11, 13]},
        "turn_sample_lens: found token 6 on no path",
    ),
    (
        "a kind missing",
        TWICE,
        {"attn_type_map": [1]},
        "q_ranges: found 11 ranges of queries",
    ),
    (
        "an odd kind",
        SINGLE,
        {"attn_type_map": [2]},
        "attn_type_map: found kind 2, expected 0",
    ),
    (
        "a causal one made full",
        SINGLE,
        {"attn_type_map": [0]},
        "q_ranges: found Range(query_start=0",
    ),
    (
        "a look at another branch",
        TWICE,
        ranges(TWICE, "k_ranges", 4, (4, 7)),
        "q_ranges: found Range(query_start=7, query_end=11, key_start=4, key_end=7, causal=False), "
        "expected Range(query_start=7, query_end=11, key_start=0, key_end=4, causal=False)",
    ),
    (
        "keys outside of the row",
        SINGLE,
        ranges(SINGLE, "k_ranges", 0, (0, 99)),
        "q_ranges: found Range(query_start=0, query_end=8, key_start=0, key_end=99",
    ),
    (
        "one range twice",
        ONE_BRANCH,
        ranges(ONE_BRANCH, "k_ranges", 2, (5, 9)) | ranges(ONE_BRANCH, "attn_type_map", 2, 1),
        "q_ranges: found one range twice, expected Range(query_start=5",
    ),
    (
        "no sources",
        FOREST,
        {"routing_source_path": None},
        "routing_source_path: found none, expected the path of each token's route",
    ),
    (
        "sources too short",
        FOREST,
        {"routing_source_path": torch.zeros(3, dtype=torch.int64)},
        "routing_source_path: found torch.int64 [3], expected whole numbers [16]",
    ),
    (
        "sources of floats",
        FOREST,
        {"routing_source_path": torch.zeros(16)},
        "routing_source_path: found Tensor, expected whole numbers [16]",
    ),
    (
        "a source on no path",
        TWICE,
        source(TWICE, "routing_source_path", 2, 3),
        "routing_source_path[2]: found path 3, expected 0 to 2",
    ),
    (
        "a source before its path",
        TWICE,
        source(TWICE, "routing_source_read_pos", 0, 0),
        "routing_source_read_pos[0]: found token 0 of path 0, expected the one that is token 1",
    ),
    (
        "a negative source",
        TWICE,
        source(TWICE, "routing_source_read_pos", 0, -6),
        "routing_source_read_pos[0]: found token -6 of path 0",
    ),
    (
        "a source shifted by one",
        TWICE,
        source(TWICE, "routing_source_read_pos", 8, 7),
        "routing_source_read_pos[8]: found token 7 of path 1, expected the one that is token 9 of",
    ),
    (
        "a source behind its path",
        TWICE,
        source(TWICE, "routing_source_read_pos", 8, 13),
        "routing_source_read_pos[8]: found token 13 of path 1",
    ),
]


@pytest.mark.parametrize(
    ("shape", "changes", "words"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_an_inconsistent_tree_is_refused_by_row_and_field(shape, changes, words):
    check(shape)
    with pytest.raises(BatchError) as caught:
        check(shape, **changes)
    assert f"row 3: merge_info.{words}" in str(caught.value)


def test_a_chain_of_many_nodes_is_refused_before_its_ranges_are_made():
    nodes = [{"start": n, "end": n + 1, "parent": n - 1} for n in range(8)]
    tree = stored_tree(SINGLE) | {"nodes": nodes, "path_to_leaf": [(7, 7)]}
    with pytest.raises(BatchError, match="q_ranges: found 1 ranges, expected 36, those of"):
        checked_tree(
            MergedRow(path_routes=(), tree=tree), length=5, width=40, where="row 3", routes=False
        )


def test_several_paths_without_a_tree_cannot_be_replayed():
    row = MergedRow(path_routes=(torch.zeros(3, 1, 2), torch.zeros(3, 1, 2)), tree=None)
    with pytest.raises(BatchError) as caught:
        checked_tree(row, length=5, width=40, where="row 3", routes=True)
    assert str(caught.value) == (
        "row 3: merge_info: found 2 paths and no tree, expected a tree that says which token "
        "belongs to which path"
    )
