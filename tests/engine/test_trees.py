"""Micro-batches of merged rows: as trees, and one row a path."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tree_shapes import FOREST, ONE_BRANCH, PREFIX, SHAPES, SINGLE, TWICE, merged_batch

from replay_lib.batch import RankBatch
from replay_lib.engine.inputs import MicroBatch, RankInput, micro_batches, packed_routes, rank_input
from replay_lib.engine.reference_trees import unmerged_batch
from replay_lib.engine.trees import check_rows_option
from replay_lib.errors import BatchError, UsageError

CPU = torch.device("cpu")
V, E, K, L, WIDTH = 50, 6, 2, 2, 40
MODEL = SimpleNamespace(moe_layers=(True, True), topk=K, experts=E, vocab=V)
ROWS = (TWICE, PREFIX, ONE_BRANCH, FOREST, SINGLE)


def batch() -> RankBatch:
    return merged_batch(ROWS, vocab=V, layers=L, experts=E, topk=K, width=WIDTH)


def read(rows: RankBatch, *, split=((3, 0), (1, 2, 4)), replay=True, loss_only=False) -> RankInput:
    return rank_input(rows, split, MODEL, replay=replay, loss_tokens_only=loss_only)


def packed(rank: RankInput, *, unmerged: bool) -> list[MicroBatch]:
    return micro_batches([rank], CPU, unmerged=unmerged)


def path_tokens(rows: RankBatch, row: int) -> list[list[int]]:
    return [rows.input_ids[row, path].tolist() for path in ROWS[row].paths()]


def test_merged_rows_stand_one_after_another_with_their_padding():
    rank = read(batch())
    first, second = packed(rank, unmerged=False)
    assert first.rows == (3, 0) and first.size == FOREST.total + TWICE.total
    assert second.size == PREFIX.total + ONE_BRANCH.total + SINGLE.total
    ids = rank.batch.input_ids
    assert first.tokens[0, : FOREST.total].tolist() == ids[3, : FOREST.total].tolist()
    start = FOREST.total
    assert first.tokens[0, start : start + 8].tolist() == ids[0, :8].tolist()
    assert first.layout.positions[start : start + 8].tolist() == [0, 1, 2, 3, 4, 5, 6, 4]
    assert first.layout.longest == 26  # the path of the last leaf, padding included
    pieces = first.layout.pieces
    assert [p.start for p in pieces] == [0, 4, 6, 8, 11, *(start + n for n in (0, 4, 7, 11, 14))]
    assert pieces[-1].before == ((start, start + 4), (start + 7, start + 11))


def test_unmerged_rows_are_the_paths_in_the_micro_batch_of_their_row():
    rank = read(batch())
    for micro in packed(rank, unmerged=True):
        wanted = [t for row in micro.rows for path in path_tokens(rank.batch, row) for t in path]
        assert micro.size % 128 == 0
        assert micro.tokens[0, : len(wanted)].tolist() == wanted
        assert (micro.tokens[0, len(wanted) :] == 0).all()
        lengths = [len(p) for row in micro.rows for p in ROWS[row].paths()]
        positions = [t for n in lengths for t in range(n)]
        assert micro.layout.positions[: len(positions)].tolist() == positions


@pytest.mark.parametrize("unmerged", [False, True])
def test_each_recorded_token_is_found_again(unmerged):
    """The token, its position and its label, at the place where its log-probability is taken."""
    rank = read(batch())
    for micro in packed(rank, unmerged=unmerged):
        rows = list(micro.rows)
        mask = rank.batch.attention_mask[rows]
        place = micro.place.view(mask.shape)
        ids, labels = rank.batch.input_ids[rows], rank.batch.labels[rows]
        assert torch.equal(micro.tokens[0][place][mask], ids[mask])
        assert torch.equal(micro.labels[place][mask], labels[mask])
        places = place[mask]
        assert len(places.unique()) == len(places)  # each from one place of its own


def test_a_token_is_taken_from_the_path_that_trains_it():
    rank = read(batch())
    micro = packed(rank, unmerged=True)[0]
    place = micro.place.view(2, WIDTH)[1]  # TWICE: paths of 7, 11 and 13 tokens behind FOREST's
    starts = [23, 30, 41]
    for path, tokens in TWICE.trained.items():
        for token in tokens:
            assert int(place[TWICE.paths()[path][token]]) == starts[path] + token


def routes_of(rank: RankInput, row: int) -> list[tuple[list[int], torch.Tensor]]:
    """Places and routes of each path of a row."""
    assert rank.batch.merge_info is not None
    merged = rank.batch.merge_info[row]
    assert merged is not None
    return list(zip(ROWS[row].paths(), merged.path_routes, strict=True))


def test_merged_tokens_have_the_routes_of_their_paths():
    rank = read(batch())
    for micro in packed(rank, unmerged=False):
        assert micro.origin is not None and micro.experts is not None
        assert (micro.experts[:, micro.origin < 0] == torch.arange(K)).all()
        start = 0
        for row in micro.rows:
            for places, routes in routes_of(rank, row):
                mine = micro.experts[:, [start + place for place in places[:-1]]]
                assert torch.equal(mine, routes.transpose(0, 1))
            start += ROWS[row].total


def test_unmerged_tokens_have_the_routes_of_their_own_path():
    rank = read(batch())
    for micro in packed(rank, unmerged=True):
        assert micro.experts is not None
        start = 0
        for row in micro.rows:
            for places, routes in routes_of(rank, row):
                end = start + len(places)
                mine = micro.experts[:, start : end - 1]
                assert torch.equal(mine, routes.transpose(0, 1))
                assert (micro.experts[:, end - 1] == torch.arange(K)).all()
                start = end
        assert (micro.experts[:, start:] == torch.arange(K)).all()


def test_a_route_of_a_paths_last_token_is_not_used():
    """As in flat rows, n routes for n tokens are taken, and the last of them is left out."""
    rows = batch()
    assert rows.merge_info is not None
    extra = torch.tensor([E - 2, E - 1], dtype=torch.int16).expand(1, L, K)
    longer = tuple(
        dataclasses.replace(m, path_routes=tuple(torch.cat([r, extra]) for r in m.path_routes))
        for m in rows.merge_info
        if m is not None
    )
    micro = packed(read(rows.replace(merge_info=longer), split=((4,),)), unmerged=True)[0]
    assert micro.experts is not None
    assert (micro.experts[:, 4] == torch.arange(K)).all()


def test_a_path_of_an_own_route_keeps_it_unmerged_only():
    rows = batch()
    assert rows.merge_info is not None and rows.merge_info[0] is not None
    other = (rows.merge_info[0].path_routes[2][4] + 1) % E
    rows.merge_info[0].path_routes[2][4] = other  # token 7 of the row, whose route is the second's
    rank = read(rows)
    merged, apart = packed(rank, unmerged=False)[0], packed(rank, unmerged=True)[0]
    assert merged.experts is not None and apart.experts is not None
    assert not (merged.experts[:, FOREST.total + 7] == other).all()
    assert (apart.experts[:, 41 + 4] == other).all()
    assert not (apart.experts[:, 30 + 4] == other).all()


@pytest.mark.parametrize("unmerged", [False, True])
def test_where_routes_are_forced_follows_the_tokens(unmerged):
    rank = read(batch(), loss_only=True)
    assert rank.forced_BTL is not None
    for micro in packed(rank, unmerged=unmerged):
        asked = packed_routes(rank, rank.forced_BTL, micro)
        flat = rank.batch.loss_mask[list(micro.rows)].flatten()
        assert micro.origin is not None
        wanted = torch.where(micro.origin < 0, False, flat[micro.origin.clamp(min=0)])
        assert torch.equal(asked.forced, wanted.expand(L, -1))
    everywhere = read(batch())
    for micro in packed(everywhere, unmerged=unmerged):
        assert packed_routes(everywhere, everywhere.forced_BTL, micro).forced.all()


def test_rows_without_replay_have_no_experts():
    rank = read(batch(), replay=False)
    assert rank.routes_BTLK is None
    for unmerged in (False, True):
        assert all(m.experts is None for m in packed(rank, unmerged=unmerged))


def test_a_flat_row_beside_merged_ones_is_one_path():
    rows = batch()
    assert rows.merge_info is not None and rows.merge_info[4] is not None
    flat_routes = rows.merge_info[4].path_routes[0]
    mixed = rows.replace(
        merge_info=(*rows.merge_info[:4], None), routes=(None, None, None, None, flat_routes)
    )
    for unmerged in (False, True):
        micro = packed(read(mixed, split=((4, 0),)), unmerged=unmerged)[0]
        assert micro.tokens[0, :5].tolist() == rows.input_ids[4, :5].tolist()
        assert micro.experts is not None
        assert torch.equal(micro.experts[:, :4], flat_routes.transpose(0, 1))


def test_routes_of_a_path_are_checked_by_row_and_path():
    rows = batch()
    assert rows.merge_info is not None and rows.merge_info[3] is not None
    rows.merge_info[3].path_routes[1][2] = E
    with pytest.raises(BatchError, match=rf"row 3: path 1: token 2, layer 0: found experts \[{E}"):
        read(rows)


def test_a_merged_row_without_routes_is_named():
    rows = batch()
    assert rows.merge_info is not None
    bare = tuple(
        m if n != 2 or m is None else type(m)(path_routes=(), tree=m.tree)
        for n, m in enumerate(rows.merge_info)
    )
    with pytest.raises(BatchError, match=r"rows \[2\] have none; the trainer refuses"):
        read(rows.replace(merge_info=bare))


def test_an_inconsistent_row_is_named():
    rows = batch()
    assert rows.merge_info is not None and rows.merge_info[1] is not None
    assert rows.merge_info[1].tree is not None
    rows.merge_info[1].tree["nodes"][1]["start"] = 4
    with pytest.raises(BatchError, match=r"dp rank 0: row 1: merge_info\.nodes\[1\]: found tokens"):
        read(rows)


def test_a_packing_of_trees_is_refused_where_there_are_none():
    flat = batch().replace(merge_info=None)
    check_rows_option("recorded", [flat], Path("x"))
    check_rows_option("unmerged", [flat, batch()], Path("x"))
    with pytest.raises(UsageError) as caught:
        check_rows_option("unmerged", [flat], Path("x"))
    assert str(caught.value) == (
        "x: rows: found unmerged asked for where no row is a prefix tree (merge_info), expected "
        "recorded. Leave the option --rows out"
    )


@pytest.mark.parametrize("name", SHAPES)
def test_the_oracle_takes_the_same_paths(name):
    """Its own reading of the tree: each trained token in one row, its columns with it."""
    shape = SHAPES[name]
    rows = merged_batch([shape], vocab=V, layers=L, experts=E, topk=K, width=WIDTH)
    apart = unmerged_batch(rows)
    flat, paths = apart.batch, shape.paths()
    assert flat.lengths() == [len(p) for p in paths] and flat.merge_info is None
    for path, tokens in shape.trained.items():
        for token in tokens:
            assert bool(flat.loss_mask[path, token])
            place = paths[path][token]
            for column in ("advantage", "old_logprobs", "labels", "ref_logprobs"):
                assert flat.column(column)[path, token] == rows.column(column)[0, place]
            assert flat.labels[path, token] == flat.input_ids[path, token + 1]
    assert int(flat.loss_mask.sum()) == int(rows.loss_mask.sum())
    assert torch.equal(
        apart.gather(flat.input_ids)[0, : shape.real], rows.input_ids[0, : shape.real]
    )
