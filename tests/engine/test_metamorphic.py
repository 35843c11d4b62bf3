"""Relations between replays of one step that was written in another form.

Where a relation does not hold by the trainer's own definition of its loss, the test says so, and
the figure must move exactly as the float64 oracle says; where the oracle has no word (auxiliary
loss, capacity), what moves is bounded from both sides. All in float32 on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from written_step import (
    SETTINGS,
    SHAPE,
    Replays,
    content,
    empty_rows,
    join,
    make_batch,
    make_weights,
    split,
)

from replay_lib.batch import RankBatch
from replay_lib.engine.protocol import Outcome
from replay_lib.snapshot import Content

pytestmark = pytest.mark.xdist_group("metamorphic")

#: Float32 sums of some hundred terms in another order; the worst of all relations is 9e-7.
SUMS = 2e-6
#: The same for the norm of one parameter, whose gradient may be a small rest of larger terms; 4e-6.
SUMS_OF_ONE = 2e-5
#: Engine in float32 against the oracle in float64, over two layers; the worst seen is 2e-7.
ORACLE = 2e-6
#: What is said to move by design moves by far more than rounding.
MOVED = 1e-2

BY_SEQUENCE = SETTINGS.replace(micro_batch_denominator_type="sequence")
ORDER = [5, 2, 7, 0, 3, 6, 1, 4]
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replays]:
    running = Replays(tmp_path_factory.mktemp("steps"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def base(replays: Replays) -> Outcome:
    return replays(content(make_batch()))


def off(outcome: Outcome, reference: Outcome) -> float:
    """By how much a norm is off another, relative, signed."""
    return outcome.grad_norm_preclip / reference.grad_norm_preclip - 1


def assert_same(outcome: Outcome, reference: Outcome, scale: float = 1.0) -> None:
    """Norms of the whole and of each parameter, up to the order of sums."""
    expected = reference.grad_norm_preclip * scale
    assert abs(outcome.grad_norm_preclip / expected - 1) <= SUMS
    assert set(outcome.param_norms) == set(reference.param_norms)
    for name, norm in reference.param_norms.items():
        assert abs(outcome.param_norms[name] / (norm * scale) - 1) <= SUMS_OF_ONE, name


def assert_as_the_oracle(replays: Replays, step: Content, outcome: Outcome) -> None:
    oracle = replays.oracle(step)
    assert abs(outcome.grad_norm_preclip / oracle.grad_norm_preclip - 1) <= ORACLE
    assert outcome.denominator == oracle.denominator


def one_by_one(batch: RankBatch, size: int, settings=SETTINGS) -> Content:
    """Static micro-batches of ``size`` rows."""
    static = {"use_dynamic_batch_size": False, "train_micro_batch_size": size}
    return content(batch, settings=settings, **static)


def test_the_step_is_worth_comparing(replays: Replays, base: Outcome) -> None:
    step = content(make_batch())
    assert_as_the_oracle(replays, step, base)
    assert [len(rows) for rows in split(step)[0]] == [2, 3, 3]
    assert all(norm > 1e-4 for norm in base.param_norms.values())
    assert replays(step).digest == base.digest  # another model in the same worker


# ---- order and grouping ------------------------------------------------------------------------


def test_the_order_of_rows_does_not_matter(replays: Replays, base: Outcome) -> None:
    step = content(make_batch().select(ORDER))
    moved = [{ORDER[row] for row in rows} for rows in split(step)[0]]
    assert moved == [set(rows) for rows in split(content(make_batch()))[0]]
    assert_same(replays(step), base)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_grouping_does_not_matter_for_token_denominators(
    replays: Replays, base: Outcome, size: int
) -> None:
    assert_same(replays(one_by_one(make_batch(), size)), base)


def test_the_grouping_matters_for_token_means_over_sequences(replays: Replays) -> None:
    """Each micro-batch's token mean counts as often as it has sequences: long rows weigh less
    beside short ones than alone."""
    batch = make_batch()
    steps = [content(batch, settings=BY_SEQUENCE)]
    steps += [one_by_one(batch, size, BY_SEQUENCE) for size in (1, 2, 8)]
    outcomes = [replays(step) for step in steps]
    for step, outcome in zip(steps, outcomes, strict=True):
        assert outcome.denominator == batch.rows
        assert_as_the_oracle(replays, step, outcome)
    norms = sorted(outcome.grad_norm_preclip for outcome in outcomes)
    assert all(high / low - 1 > MOVED / 2 for low, high in pairwise(norms))


def test_the_grouping_does_not_matter_for_sequence_means_over_sequences(replays: Replays) -> None:
    settings = BY_SEQUENCE.replace(loss_agg_type="seq-mean-token-mean")
    reference = replays(content(make_batch(), settings=settings))
    for size in (1, 8):
        assert_same(replays(one_by_one(make_batch(), size, settings)), reference)


# ---- rows that add nothing ---------------------------------------------------------------------


def test_empty_rows_add_nothing(replays: Replays, base: Outcome) -> None:
    outcome = replays(content(join(make_batch(), empty_rows(3))))
    assert outcome.denominator == base.denominator
    assert_same(outcome, base)


def test_rows_whose_loss_mask_is_empty_add_nothing(replays: Replays, base: Outcome) -> None:
    others = make_batch(seed=5)
    masked = others.replace(loss_mask=torch.zeros_like(others.loss_mask))
    outcome = replays(content(join(masked, make_batch())))
    assert outcome.denominator == base.denominator
    assert_same(outcome, base)


def test_empty_rows_regroup_the_others_where_grouping_matters(replays: Replays) -> None:
    """Twenty empty rows are 80 tokens more: four micro-batches instead of three."""
    alone = content(make_batch(), settings=BY_SEQUENCE)
    beside = content(join(make_batch(), empty_rows(20)), settings=BY_SEQUENCE)
    assert (len(split(alone)[0]), len(split(beside)[0])) == (3, 4)
    outcome = replays(beside)
    assert outcome.denominator == make_batch().rows  # an empty row is no sequence
    assert abs(off(outcome, replays(alone))) > MOVED
    assert_as_the_oracle(replays, beside, outcome)


# ---- padding -----------------------------------------------------------------------------------


def widened(batch: RankBatch, more: int) -> RankBatch:
    """The same rows, padded by ``more`` columns."""
    columns = {
        field.name: torch.nn.functional.pad(value, (0, more), value=-100 if label else 0)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and value.dim() == 2
        for label in [field.name == "labels"]
    }
    position = torch.arange(batch.width + more).expand(batch.rows, -1).contiguous()
    return batch.replace(**(columns | {"position_ids": position}))


@pytest.mark.parametrize("model", [{}, AUXILIARY], ids=["plain", "auxiliary loss"])
def test_wider_padding_changes_no_bit(replays: Replays, model: dict) -> None:
    """Columns of padding are cut off before the model: not even an auxiliary loss sees them."""
    narrow = replays(content(make_batch(), model=model))
    assert replays(content(widened(make_batch(), 32), model=model)).digest == narrow.digest


def test_empty_rows_move_the_figure_through_the_auxiliary_loss(replays: Replays) -> None:
    """Padding tokens are routed to the experts 0..K-1 and count in the balance of experts, which
    has a gradient: the figure moves, by 7 % here, although they have no share in the loss."""
    reference = replays(content(make_batch(), model=AUXILIARY))
    padded = replays(content(join(make_batch(), empty_rows(3)), model=AUXILIARY))
    assert MOVED < abs(off(padded, reference)) < 0.5
    assert padded.loss == pytest.approx(reference.loss, rel=SUMS)
    head = "output_layer.weight"  # behind every router: its gradient is the loss's alone
    assert padded.param_norms[head] == pytest.approx(reference.param_norms[head], rel=SUMS_OF_ONE)


def test_empty_rows_move_the_figure_through_a_finite_capacity(replays: Replays) -> None:
    """Padding tokens take places at the experts 0..K-1: less probable real tokens are dropped."""
    model = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "probs"}
    reference = replays(content(make_batch(), model=model))
    padded = replays(content(join(make_batch(), empty_rows(3)), model=model))
    assert MOVED < abs(off(padded, reference)) < 0.5
    assert padded.loss != pytest.approx(reference.loss, rel=1e-3)  # the forward itself moved


# ---- experts -----------------------------------------------------------------------------------


def permuted(orders_LE: list[list[int]]) -> tuple[dict[str, Tensor], RankBatch]:
    """Weights and batch with the experts of layer l in the order ``orders_LE[l]``."""
    weights, batch = make_weights(), make_batch()
    for name in [n for n in weights if ".mlp." in n]:
        layers = zip(weights[name], orders_LE, strict=True)
        weights[name] = torch.stack([layer[order] for layer, order in layers])
    place_LE = torch.tensor([[o.index(e) for e in range(SHAPE.experts)] for o in orders_LE])
    routes = tuple(
        torch.stack([place_LE[i][r[:, i].long()] for i in range(SHAPE.layers)], dim=1).to(r.dtype)
        for r in batch.routes
    )
    return weights, batch.replace(routes=routes)


ORDERS = [[2, 0, 3, 1], [1, 3, 2, 0]]


def test_experts_may_stand_in_any_order(replays: Replays, base: Outcome) -> None:
    """Placeholder routes name other experts then; no token that trains depends on them."""
    weights, batch = permuted(ORDERS)
    assert_same(replays(content(batch, weights=weights)), base)


def test_a_router_finds_its_experts_in_any_order(replays: Replays) -> None:
    weights, batch = permuted(ORDERS)
    free = "disable-routing-replay"
    reference = replays(content(make_batch()), free)
    assert_same(replays(content(batch, weights=weights), free), reference)


def test_permuted_experts_without_their_routes_are_another_step(
    replays: Replays, base: Outcome
) -> None:
    weights, batch = permuted(ORDERS)
    assert abs(off(replays(content(make_batch(), weights=weights)), base)) > MOVED
    assert abs(off(replays(content(batch)), base)) > MOVED


# ---- scale and copies --------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 3.0, 1000.0])
def test_the_gradient_is_linear_in_the_loss(replays: Replays, base: Outcome, factor: float) -> None:
    """The advantage scales the policy term (grpo2 clips ratios, never losses), its weight the KL
    term."""
    batch = make_batch()
    scaled = batch.replace(advantage=batch.advantage * factor)
    settings = SETTINGS.replace(kl_control_alpha=SETTINGS.kl_control_alpha * factor)
    outcome = replays(content(scaled, settings=settings))
    assert outcome.loss == pytest.approx(base.loss * factor, rel=SUMS)
    assert_same(outcome, base, scale=factor)


def test_a_scaled_advantage_leaves_the_kl_term_as_it_is(replays: Replays, base: Outcome) -> None:
    batch = make_batch()
    step = content(batch.replace(advantage=batch.advantage * 3.0))
    outcome = replays(step)
    assert off(outcome, base) + 1 < 3.0 - MOVED
    assert_as_the_oracle(replays, step, outcome)


def test_every_row_twice_is_the_same_mean(replays: Replays, base: Outcome) -> None:
    batch = make_batch()
    for step in (content(join(batch, batch)), content(batch, batch)):  # in one rank, or in two
        outcome = replays(step)
        assert outcome.denominator == 2 * base.denominator
        assert_same(outcome, base)


def test_rows_twice_in_one_rank_are_regrouped_where_grouping_matters(replays: Replays) -> None:
    batch = make_batch()
    once = replays(content(batch, settings=BY_SEQUENCE))
    in_two_ranks = replays(content(batch, batch, settings=BY_SEQUENCE))
    assert_same(in_two_ranks, once)  # each rank splits as before
    step = content(join(batch, batch), settings=BY_SEQUENCE)
    in_one = replays(step)
    assert in_one.denominator == in_two_ranks.denominator == 2 * batch.rows
    assert abs(off(in_one, once)) > MOVED
    assert_as_the_oracle(replays, step, in_one)
