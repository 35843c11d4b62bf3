"""Packing: rows end to end, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_lib.errors import BatchError
from replay_lib.packing import pack, unpack

masks = st.integers(1, 7).flatmap(
    lambda width: st.lists(
        st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=5
    )
)


@given(masks, st.sampled_from([1, 4, 128]))
def test_unpacking_gives_the_rows_back_with_zeros_off_the_mask(mask, align):
    mask = torch.tensor(mask)
    rows = torch.arange(1.0, mask.numel() * 2 + 1).reshape(*mask.shape, 2)
    packed = pack(rows, mask, align=align, fill=-1.0)
    total = int(mask.sum())
    assert packed.values.shape[0] % align == 0
    assert 0 <= packed.values.shape[0] - total < align
    assert bool((packed.values[total:] == -1.0).all())
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == int(packed.cu_seqlens.diff().max())
    assert list(packed.lengths) == mask.sum(dim=1).tolist()
    back = unpack(packed.values, packed.cu_seqlens, mask)
    assert torch.equal(back, rows * mask.unsqueeze(-1))


def test_the_tail_belongs_to_the_last_row():
    packed = pack(torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool), align=16)
    assert packed.cu_seqlens.tolist() == [0, 4, 8, 16]
    assert (packed.lengths, packed.max_seqlen) == ((4, 4, 4), 8)


def test_a_tail_of_another_value_for_each_layer():
    filler = torch.tensor([[0, 1], [0, 1]])
    mask = torch.tensor([[True, True, False]])
    packed = pack(torch.full((1, 3, 2, 2), 7), mask, align=4, fill=filler)
    assert packed.values[2:].tolist() == [filler.tolist()] * 2


def test_gradients_pass_both_ways_and_reach_real_tokens_only():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rows = torch.randn(2, 3, requires_grad=True)
    packed = pack(rows, mask, align=8)
    weights = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    (unpack(packed.values, packed.cu_seqlens, mask) * weights).sum().backward()
    assert torch.equal(rows.grad, weights * mask)


def test_rows_may_have_tails_of_their_own():
    mask = torch.tensor([[True, True], [True, False]])
    values = torch.tensor([1.0, 2.0, 0.0, 3.0, 0.0])
    back = unpack(values, torch.tensor([0, 3, 5], dtype=torch.int32), mask)
    assert back.tolist() == [[1.0, 2.0], [3.0, 0.0]]


@pytest.mark.parametrize("bounds", [[0, 1, 4], [0, 4], [1, 3, 4], [0, 2, 5]])
def test_bounds_that_do_not_fit_are_refused(bounds):
    mask = torch.tensor([[True, True], [True, False]])
    with pytest.raises(BatchError) as error:
        unpack(torch.zeros(4), torch.tensor(bounds, dtype=torch.int32), mask)
    assert str(error.value) == (
        f"packed batch: cu_seqlens: found bounds {bounds} for 4 packed values, expected room for "
        "rows of [2, 1] tokens, from 0 to the end"
    )


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(BatchError) as error:
        pack(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))
    assert str(error.value) == (
        "batch: attention_mask: found shape [2, 4] for rows of [2, 3], expected [B, T] of the "
        "rows, B > 0"
    )
