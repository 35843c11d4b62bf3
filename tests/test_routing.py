"""Routes: laid over tokens, and refused where they cannot have been taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_lib.errors import BatchError
from replay_lib.routing import check_routes, compose_padding, expand_routes, placeholder

LAYERS, TOPK, EXPERTS = 3, 2, 8


def routes_of(length: int, extra: int = 0, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """Route rows for ``length`` tokens; row i names experts that tell i (alignment shows)."""
    rows = max(length - 1, 0) + extra
    ids = torch.arange(rows).reshape(-1, 1, 1) % (EXPERTS - 1)
    return (ids + torch.arange(TOPK)).expand(rows, LAYERS, TOPK).clone().to(dtype)


def check(routes, lengths, **more):
    shape = {"layers": LAYERS, "topk": TOPK, "experts": EXPERTS} | more
    check_routes(routes, lengths, where="batch", **shape)


def mask_of(lengths, width):
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_tokens_but_the_last_get_their_routes_and_all_else_the_placeholder(lengths):
    routes = [routes_of(n) for n in lengths]
    expanded = expand_routes(routes, mask_of(lengths, 9))
    assert expanded.shape == (len(lengths), 9, LAYERS, TOPK)
    assert expanded.dtype == torch.int16
    filler = torch.arange(TOPK).expand(LAYERS, TOPK)
    for row, length in enumerate(lengths):
        for token in range(9):
            routed = token < length - 1
            expected = routes[row][token] if routed else filler
            assert expanded[row, token].tolist() == expected.tolist()


def test_a_route_for_the_last_token_is_taken_and_not_used():
    expanded = expand_routes([routes_of(4, extra=1)], mask_of([4], 5))
    assert torch.equal(expanded, expand_routes([routes_of(4)], mask_of([4], 5)))
    check([routes_of(4, extra=1)], [4])


@pytest.mark.parametrize("extra", [-1, 2])
def test_other_counts_are_refused_with_the_counts(extra):
    routes = [routes_of(3), routes_of(5, extra=extra)]
    text = (
        f"row 1: routes: found shape [{4 + extra}, 3, 2], expected [4, 3, 2] for 5 tokens "
        "(or 5 rows). A rollout engine that cut or shifted the routes cannot be replayed."
    )
    with pytest.raises(BatchError) as error:
        check(routes, [3, 5])
    assert str(error.value) == f"batch: {text}"
    with pytest.raises(BatchError) as error:
        expand_routes(routes, mask_of([3, 5], 5))
    assert str(error.value) == f"routes: {text}"


@pytest.mark.parametrize("bad", [-1, EXPERTS])
def test_an_id_out_of_range_is_refused_with_its_place(bad):
    routes = [routes_of(3), routes_of(6)]
    routes[1][2, 1, 0] = bad
    with pytest.raises(BatchError) as error:
        check(routes, [3, 6])
    assert str(error.value) == (
        f"batch: row 1: token 2, layer 1: found experts [{bad}, 3], expected ids from 0 to 7. "
        "1 such places in this row."
    )


def test_one_expert_twice_is_refused_with_its_place():
    routes = [routes_of(6)]
    routes[0][4, 2] = 5
    with pytest.raises(BatchError) as error:
        check(routes, [6])
    assert str(error.value) == (
        "batch: row 0: token 4, layer 2: found experts [5, 5], expected different experts. "
        "1 such places in this row."
    )


def test_dummies_of_dense_layers_are_not_looked_at_when_the_moe_layers_are_named():
    routes = [routes_of(6)]
    routes[0][:, 0] = 0
    with pytest.raises(BatchError, match="token 0, layer 0"):
        check(routes, [6])
    check(routes, [6], moe_layers=[1, 2])
    routes[0][3, 2] = 1
    with pytest.raises(BatchError, match="token 3, layer 2"):
        check(routes, [6], moe_layers=[1, 2])


def test_the_unused_row_is_not_looked_at():
    routes = routes_of(4, extra=1)
    routes[3] = -1
    check([routes], [4])


@pytest.mark.parametrize(
    ("dtype", "experts", "refused"),
    [
        (torch.int8, 128, False),
        (torch.int8, 129, True),
        (torch.uint8, 256, False),
        (torch.uint8, 301, True),
        (torch.int16, 301, False),
    ],
)
def test_a_dtype_whose_ids_may_have_wrapped_is_refused(dtype, experts, refused):
    routes = [routes_of(4, dtype=dtype)]
    if not refused:
        check(routes, [4], experts=experts)
        return
    with pytest.raises(BatchError, match=f"expected ids up to {experts - 1}. They may have wrap"):
        check(routes, [4], experts=experts)


def test_floating_point_routes_are_refused():
    with pytest.raises(BatchError, match=r"found torch\.float32, expected integers"):
        check([routes_of(4).float()], [4])


def test_rows_without_routes_are_never_mixed_with_rows_that_have_them():
    with pytest.raises(BatchError) as error:
        check([routes_of(3), None, None], [3, 4, 5])
    assert str(error.value) == (
        "batch: routes: found no routes for rows [1, 2] of 3, expected routes for all rows or for "
        "none"
    )
    check([None, None], [3, 4])


def test_rows_and_routes_have_to_be_as_many():
    with pytest.raises(BatchError, match="found 1 rows, expected 2, as in the batch"):
        check([routes_of(3)], [3, 3])
    with pytest.raises(BatchError, match="found routes of 1 rows, expected one for each of 2 rows"):
        expand_routes([routes_of(3)], mask_of([3, 3], 4))


def test_the_row_that_differs_from_the_first_is_named():
    odd = routes_of(5)[:, :2]
    with pytest.raises(
        BatchError, match=r"routes: row 1: routes: found shape \[4, 2, 2\], expected"
    ):
        expand_routes([routes_of(3), odd], mask_of([3, 5], 5))
    with pytest.raises(
        BatchError, match=r"batch: row 1: routes: found shape \[4, 2, 2\], expected"
    ):
        check([routes_of(3), odd], [3, 5])
    with pytest.raises(BatchError, match=r"found shape \[8, 2\]"):
        check([routes_of(5)[:, 0].repeat(2, 1)], [5])


def test_expanded_routes_have_the_dtype_of_the_first():
    rows = [routes_of(3, dtype=torch.int32), routes_of(3)]
    assert expand_routes(rows, mask_of([3, 3], 3)).dtype == torch.int32
    with pytest.raises(BatchError, match="found routes of 0 rows, expected one for each of 0 rows"):
        expand_routes([], mask_of([], 3).reshape(0, 3))


def test_more_routes_than_rows_are_refused():
    with pytest.raises(BatchError, match="found 3 rows, expected 2, as in the batch"):
        check([routes_of(3)] * 3, [3, 3])
    with pytest.raises(BatchError, match="found routes of 3 rows, expected one for each of 2 rows"):
        expand_routes([routes_of(3)] * 3, mask_of([3, 3], 4))


@pytest.mark.parametrize("length", [0, 1])
def test_the_unused_row_of_a_shortest_row_is_not_looked_at(length):
    check([torch.full((length, LAYERS, TOPK), -1, dtype=torch.int16)], [length])


def test_all_bad_places_of_a_row_are_counted_and_the_first_is_named():
    routes = routes_of(6)
    routes[1, 2, 1] = routes[3, 0, 0] = routes[3, 1, 0] = EXPERTS
    with pytest.raises(BatchError) as error:
        check([routes], [6])
    assert "token 1, layer 2: found experts [1, 8], expected ids from 0 to 7" in str(error.value)
    assert str(error.value).endswith("3 such places in this row.")
    with pytest.raises(BatchError, match=r"token 1, layer 2.* 2 such places"):
        check([routes], [6], moe_layers=[1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_only_integers_name_experts(dtype):
    with pytest.raises(BatchError, match="expected integers"):
        check([routes_of(4).to(dtype)], [4])


def test_the_last_and_the_first_expert_may_be_chosen():
    routes = routes_of(2)
    routes[:] = torch.tensor([EXPERTS - 1, 0])
    check([routes], [2])


def test_padding_rows_of_zeros_get_the_placeholder_and_no_other_row_does():
    """Rows: padding of zeros, padding with experts, real tokens of zeros (twice)."""
    zeros, chosen = torch.zeros(4, LAYERS, TOPK, dtype=torch.int32), routes_of(5).to(torch.int32)
    routes = [zeros, chosen, zeros, zeros]
    filled = compose_padding(routes, torch.tensor([-1, -1, 0, 3]))
    assert filled[0].dtype == torch.int32
    assert filled[0].tolist() == [[[0, 1]] * LAYERS] * 4
    assert all(after is before for after, before in zip(filled[1:], routes[1:], strict=True))
    other = compose_padding([torch.zeros(2, 1, 3, dtype=torch.int16)], torch.tensor([-7]))
    assert other[0].tolist() == [[[0, 1, 2]]] * 2
    with pytest.raises(ValueError, match="longer"):
        compose_padding(routes, torch.tensor([-1, -1, 0, 3, 5]))


@pytest.mark.parametrize("bad", [EXPERTS, EXPERTS + 1, 100])
def test_every_id_beyond_the_experts_is_refused(bad):
    routes = routes_of(3)
    routes[1, 2, 1] = bad
    with pytest.raises(BatchError, match=f"token 1, layer 2: found experts .*{bad}"):
        check([routes], [3])


@pytest.mark.parametrize("shape", [(2, LAYERS + 1, TOPK), (2, LAYERS, TOPK + 1), (2, 2, TOPK)])
def test_other_layers_and_another_k_are_refused(shape):
    with pytest.raises(BatchError, match=r"found shape \[2, "):
        check([placeholder(*shape[1:]).repeat(shape[0], 1, 1)], [3])
