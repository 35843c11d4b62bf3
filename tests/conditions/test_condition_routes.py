"""Conditions of routes that need no model: reading, checking, laying over tokens."""

from __future__ import annotations

from collections.abc import Callable

import mutate
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

from replay_lib.analysis import Examined, examine
from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError
from replay_lib.packing import pack
from replay_lib.routing import check_routes, compose_padding, expand_routes
from replay_lib.snapshot import Content, Snapshot, load_batch

Write = Callable[[Content], Snapshot]


def examined(write: Write, content: Content) -> Examined:
    return examine(write(content).path)


def found(write: Write, content: Content, code: str) -> str:
    """What the doctor says of data-parallel rank 0."""
    findings = examined(write, content).findings
    (one,) = [f for f in findings if f.code == code and f.dp_rank == 0]
    return one.found


def checked(content: Content, experts: int = 8) -> None:
    """What the engine checks before it replays."""
    batch = content.batches[0]
    check_routes(
        batch.routes, batch.lengths(), layers=4, topk=2, experts=experts, where="batch of rank 0"
    )


def test_a1_routes_of_moe_layers_alone_fit(write: Write, content: Content) -> None:
    mixed = mutate.dense_and_moe_layers(content)
    assert not any(code.startswith(("route", "weights")) for code in examined(write, mixed).codes)


def test_a1_layers_are_told_by_the_models_count(write: Write, content: Content) -> None:
    mixed = mutate.dense_and_moe_layers(content)

    def twice(row: int, routes: torch.Tensor) -> torch.Tensor:
        routes[2, 1] = 5
        return routes

    bad = examined(write, mutate.with_routes(mixed, 0, twice)).findings[0]
    assert (bad.code, bad.token, bad.layer) == ("route-duplicate-expert", 2, 3)


def test_a5_zeros_of_padding_rows_are_the_placeholder_and_of_real_rows_are_not(
    write: Write, content: Content
) -> None:
    padded = mutate.mostly_padding(content, fill=(0, 0), times=1)
    batch = padded.batches[0]
    composed = compose_padding(batch.routes, batch.index)
    assert all(r.equal(torch.tensor([0, 1]).expand(3, 4, 2)) for r in composed[7:])
    assert all(a is b for a, b in zip(composed[:7], batch.routes, strict=False))
    assert "route-duplicate-expert" not in examined(write, padded).codes
    real = mutate.with_routes(content, 0, lambda row, r: r * 0 if row == 2 else r)
    with pytest.raises(BatchError, match=r"row 2: token 0, layer 0: found experts \[0, 0\]"):
        checked(real)


def test_a5_what_balance_makes_of_padding_is_named(write: Write, content: Content) -> None:
    told = found(write, mutate.mostly_padding(mutate.balanced(content)), "padding-moves-balance")
    assert told == (
        "252 of 399 packed tokens are padding, with moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001"
    )


def test_a6_rows_without_routes_are_named(write: Write, content: Content) -> None:
    assert found(write, mutate.rows_without_routes(content), "route-missing").endswith("2, 5")
    with pytest.raises(BatchError, match=r"no routes for rows \[2, 5\] of 7"):
        checked(mutate.rows_without_routes(content))


def test_a6_routes_that_end_with_the_first_turn_are_named(write: Write, content: Content) -> None:
    told = found(write, mutate.first_turn_only(content), "route-count")
    assert told == "5 routes for 16 tokens, not 15"
    with pytest.raises(BatchError, match=r"row 1: routes: found shape \[5, 4, 2\]"):
        checked(mutate.first_turn_only(content))


def test_a6_a_filler_in_place_of_routes_is_seen(write: Write, content: Content) -> None:
    told = found(write, mutate.later_turns_filled(content), "route-constant")
    assert told.startswith("10 tokens in a row with the experts [0, 1] of layer 0")


@pytest.mark.parametrize("extra", [0, 1, -1])
def test_a10_counts(write: Write, content: Content, extra: int) -> None:
    changed = mutate.more_or_fewer_routes(content, extra)
    codes = examined(write, changed).codes - {"rows-padding"}
    if extra >= 0:
        checked(changed)
        assert codes == ({"route-unused"} if extra else set())
        return
    assert codes == {"route-count"}
    with pytest.raises(BatchError) as caught:
        checked(changed)
    assert "found shape [14, 4, 2], expected [15, 4, 2] for 16 tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "codes"),
    [
        ((torch.int8, 300, 301), {"route-dtype-narrow"}),  # wraps to 44, in range
        ((torch.uint8, 300, 301), {"route-dtype-narrow"}),  # wraps to 44
        ((torch.int8, 130, 131), {"route-dtype-narrow", "route-expert-outside"}),  # to -126
        ((torch.uint8, 255, 256), set()),
        ((torch.int8, 127, 128), set()),
        ((torch.int16, 300, 301), set()),
        ((torch.int16, 301, 301), {"route-expert-outside"}),
        ((torch.int16, -1, 301), {"route-expert-outside"}),
        ((torch.int8, -1, 8), {"route-expert-outside"}),
    ],
)
def test_a11_ids_and_the_integers_that_hold_them(
    write: Write, content: Content, stored: tuple[torch.dtype, int, int], codes: set[str]
) -> None:
    dtype, expert, experts = stored
    changed = mutate.ids_in(content, dtype, expert, experts)
    snapshot = write(changed)
    batch = load_batch(snapshot, 0)
    assert {r.dtype for r in batch.routes if r is not None} == {dtype}  # through the disk
    assert {c for c in examine(snapshot.path).codes if c.startswith("route")} == codes
    if codes:
        with pytest.raises(BatchError, match="found"):
            checked(mutate.with_batch(changed, 0, routes=batch.routes), experts)
    else:
        checked(mutate.with_batch(changed, 0, routes=batch.routes), experts)


@pytest.mark.parametrize("extra", [0, 1])
def test_a12_every_token_gets_the_route_of_its_own_position(
    write: Write, content: Content, extra: int
) -> None:
    aligned = mutate.ids_equal_position(mutate.more_or_fewer_routes(content, extra))
    batch = load_batch(write(aligned), 0)
    routes = [r for r in batch.routes if r is not None]
    packed = pack(expand_routes(routes, batch.attention_mask), batch.attention_mask)
    start = 0
    for length in batch.lengths():
        ids = packed.values[start : start + length, 0, 0].tolist()
        assert ids[:-1] == [t % 8 for t in range(length - 1)]
        assert ids[-1] == 0  # the last token has none: the placeholder
        start += length


def test_a12_without_a_route_for_the_first_token_the_count_tells(content: Content) -> None:
    """A cached prefix: the engine gave routes from the second token on."""
    late = mutate.with_routes(content, 0, lambda row, r: r[1:] if row == 3 else r)
    with pytest.raises(BatchError, match=r"row 3: routes: found shape \[24, 4, 2\]"):
        checked(late)


def by_megatron(batch: RankBatch, factor: float) -> tuple[int, int]:
    """Choices in all and dropped ones, by Megatron-Core's own function, the batch as one pack."""
    routes = expand_routes([r for r in batch.routes if r is not None], batch.attention_mask)
    packed = pack(routes, batch.attention_mask, fill=torch.tensor([[0, 1]] * 4))
    dropped = 0
    for layer in range(4):
        ids = packed.values[:, layer].long()
        wanted = torch.zeros(len(ids), 8, dtype=torch.bool).scatter_(1, ids, True)
        _, kept = apply_router_token_dropping(wanted.float() / 2, wanted, 2, factor)
        dropped += int((wanted & ~kept).sum())
    return packed.values.numel(), dropped


def test_a18_what_capacity_drops_is_counted(write: Write, content: Content) -> None:
    one_pack = mutate.with_worker(content, train_micro_batch_size=8)
    choices, dropped = by_megatron(content.batches[0], 1.0)
    told = found(write, mutate.finite_capacity(one_pack), "capacity-drops")
    assert 0 < dropped < choices
    assert told.startswith(f"{dropped} of {choices} choices are dropped at capacity factor 1, ")


def test_a18_the_effect_of_the_tail_is_named(write: Write, content: Content) -> None:
    told = found(write, mutate.finite_capacity(content), "capacity-drops")
    assert told == (
        "677 of 2048 choices are dropped at capacity factor 1, 0 to 317 of them of real tokens; "
        "without padding rows and tails it would be 153"
    )
