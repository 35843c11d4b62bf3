"""Micro-batch splits: every row once, as many as the trainer makes, the same on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_lib.errors import BatchError
from replay_lib.microbatch import balanced_split, split_ranks, static_split

lengths_of_rows = st.lists(st.integers(1, 64), min_size=1, max_size=24)


def sums(split, lengths):
    return [sum(lengths[i] for i in group) for group in split]


@given(lengths_of_rows, st.integers(64, 300))
def test_every_row_is_in_one_micro_batch_and_none_is_empty(lengths, limit):
    split = balanced_split(lengths, 64, limit)
    assert sorted(row for group in split for row in group) == list(range(len(lengths)))
    assert all(group and group == sorted(group) for group in split)
    assert len(split) == min(len(lengths), -(-sum(lengths) // limit))
    # differencing never leaves two bins further apart than the longest row
    totals = sums(split, lengths)
    assert max(totals) - min(totals) <= max(lengths)
    squares = [sum(lengths[i] ** 2 for i in group) for group in split]
    assert squares == sorted(squares, reverse=True)


def test_rows_of_equal_length_are_spread_evenly():
    assert [len(group) for group in balanced_split([8] * 6, 8, 16)] == [2, 2, 2]


def test_rows_without_tokens_are_kept():
    split = balanced_split([5, 0, 0], 5, 5, at_least=2)
    assert sorted(row for group in split for row in group) == [0, 1, 2]


def test_a_floor_and_a_multiple_raise_the_count():
    lengths = [4] * 8
    assert len(balanced_split(lengths, 4, 32)) == 1
    assert len(balanced_split(lengths, 4, 32, at_least=3)) == 3
    assert len(balanced_split(lengths, 4, 32, at_least=3, multiple_of=2)) == 4


def test_more_micro_batches_than_rows_are_refused():
    with pytest.raises(BatchError) as error:
        balanced_split([4, 4], 4, 8, at_least=3)
    assert str(error.value) == (
        "micro-batches: count: found 3 micro-batches, expected 1 to 2, the rows of the rank"
    )


def test_a_limit_below_the_width_is_refused():
    with pytest.raises(BatchError) as error:
        balanced_split([4, 4], 128, 64)
    assert str(error.value) == (
        "micro-batches: token limit: found 64 tokens, expected the padded width, 128, or more. "
        "It is train_micro_batch_size * seq_length of the worker."
    )


@given(st.integers(0, 20), st.integers(1, 7))
def test_static_slices_cover_the_rows_in_order(rows, size):
    split = static_split(rows, size)
    assert [row for group in split for row in group] == list(range(rows))
    assert all(len(group) == size for group in split[:-1])


def test_a_static_size_below_one_is_refused():
    with pytest.raises(BatchError, match="train_micro_batch_size: found 0, expected 1 or more"):
        static_split(4, 0)


def test_all_ranks_run_as_many_as_the_one_that_needs_most():
    ranks = [[8, 8, 8, 8], [1, 1, 1, 1]]
    options = {"dynamic": True, "micro_batch_size": 1, "seq_length": 8}
    split = split_ranks(ranks, [8, 8], **options)
    assert [len(groups) for groups in split] == [4, 4]
    alone = split_ranks(ranks[1:], [8], **options)
    assert [len(groups) for groups in alone] == [1]


def test_virtual_pipelines_round_the_count_up_twice():
    options = {"dynamic": True, "micro_batch_size": 1, "seq_length": 8}
    (split,) = split_ranks([[4] * 12], [4], vpp=4, **options)
    assert len(split) == 8
    (split,) = split_ranks([[4] * 12], [4], vpp=4, group=3, **options)
    assert len(split) == 9


def test_a_static_split_of_ranks_slices_each_of_them():
    options = {"dynamic": False, "micro_batch_size": 2, "seq_length": 8}
    split = split_ranks([[8, 8, 8], [1, 1, 1]], [8, 8], **options)
    assert split == [[[0, 1], [2]], [[0, 1], [2]]]


def test_a_micro_batch_holds_as_many_tokens_as_its_rows_may_be_long():
    options = {"dynamic": True, "seq_length": 8}
    for size, expected in ((1, 4), (2, 2), (4, 1)):
        (split,) = split_ranks([[8] * 4], [8], micro_batch_size=size, **options)
        assert len(split) == expected


def test_rows_without_any_token_make_no_micro_batch():
    with pytest.raises(BatchError, match="found 0 micro-batches, expected 1 to 2"):
        balanced_split([0, 0], 5, 5)


def test_a_batch_without_rows_is_refused():
    with pytest.raises(BatchError, match="micro-batches: found a batch without rows"):
        balanced_split([], 5, 5)


def test_a_width_for_each_rank():
    with pytest.raises(ValueError, match="zip"):
        split_ranks([[4], [4]], [4], dynamic=True, micro_batch_size=1, seq_length=8)


def test_the_costliest_for_attention_comes_first_not_the_longest():
    # sums 10 and 10, squares 100 and 52; of equal squares the one with the later first row
    assert balanced_split([4, 10, 6], 10, 10) == [[1], [0, 2]]
    assert balanced_split([5, 5, 5, 5], 5, 10) == [[1, 2], [0, 3]]


def test_differencing_by_hand():
    # 8 and 7 differ by 1, 6 and 5 by 1, 4 stays: 4 - 1 = 3, then 3 - 1 = 2: {8, 6} and {7, 5, 4}
    assert balanced_split([8, 7, 6, 5, 4], 8, 15) == [[0, 2], [1, 3, 4]]
    # three bins, each pair of states merged largest with smallest
    assert balanced_split([9, 8, 7, 3, 2, 1], 9, 10) == [[0, 5], [1, 4], [2, 3]]
