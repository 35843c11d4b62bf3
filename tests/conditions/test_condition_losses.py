"""Conditions of the loss: the trainer's own value, and what the doctor says before a replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import mutate
import mutate_values
import pytest
import torch
from many_snapshots import Answer
from torch import Tensor

from replay_lib.analysis import examine
from replay_lib.analysis.columns import check_columns
from replay_lib.analysis.losses import check_losses
from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError
from replay_lib.loss import GrpoSettings, micro_batch_loss
from replay_lib.loss.filters import policy_filter
from replay_lib.loss.inputs import read_inputs
from replay_lib.loss.settings import DenominatorType, ValueAggType
from replay_lib.microbatch import balanced_split
from replay_lib.patch import clip_coefficient
from replay_lib.snapshot import Content, Snapshot

Write = Callable[[Content], Snapshot]
NAN, INF = math.nan, math.inf
MODES: tuple[ValueAggType, ...] = get_args(ValueAggType)
DENOMINATORS: tuple[DenominatorType, ...] = get_args(DenominatorType)
FILE = Path("batch_rank0.pt")
SETTINGS = GrpoSettings()
#: Where the mask is a factor a masked NaN is a NaN; the other two fill or select.
BY_FACTOR = ("token-mean", "seq-mean-token-mean", "seq-mean-token-std", "token-std")


def log_probs(batch: RankBatch) -> Tensor:
    """A policy near the old one; finite whatever the stored values are."""
    old = batch.column("old_logprobs").nan_to_num(-1.0, -1.0, -1.0)
    return old + 0.05 * torch.sin(1000 * old)


def gradient(
    batch: RankBatch, settings: GrpoSettings, parts: list[list[int]]
) -> tuple[Tensor, float]:
    """dLoss/dlogprob over all micro-batches, divided once, and the summed denominator."""
    policy = log_probs(batch).requires_grad_()
    entropy = torch.zeros_like(policy)
    total: list[Tensor] = []
    count = 0.0
    for rows in parts:
        loss = micro_batch_loss(settings, batch.select(rows), policy[rows], entropy[rows])
        total.append(loss.scaled)
        count += float(loss.denominator)
    (grad,) = torch.autograd.grad(torch.stack(total).sum(), [policy])
    return grad / count if count else grad, count


def codes(batch: RankBatch) -> dict[str, Any]:
    return {f.code: f for f in check_columns(batch, FILE, SETTINGS, None)}


def test_b1_a_steady_log_ratio_explodes_with_length() -> None:
    found = codes(mutate_values.steady_log_ratio())["sequence-weight-explodes"]
    assert found.found == (
        "3999 log-ratios of 0.01 nats on average add up to 39.99: a weight of e^40, the largest of "
        "1 rows"
    )
    assert (found.dp_rank, found.row) == (0, 0)
    assert "sequence-weight-explodes" not in codes(mutate_values.steady_log_ratio(tokens=400))


def test_b1_the_trainers_sequence_ratio_is_a_mean_and_does_not() -> None:
    batch = mutate_values.steady_log_ratio()
    policy = batch.column("old_logprobs")
    kept = policy_filter(SETTINGS, read_inputs(SETTINGS, batch, policy, torch.zeros_like(policy)))
    bounded = SETTINGS.replace(mismatch_seq_masking_low=0.98, mismatch_seq_masking_high=1.02)
    inputs = read_inputs(bounded, batch, policy, torch.zeros_like(policy))
    assert bool(policy_filter(bounded, inputs).keep_BT.all()) and bool(kept.keep_BT.all())


def test_b3_a_far_token_is_clamped_and_named(write: Write, content: Content) -> None:
    far = mutate.far_token(content)
    row, token = mutate.loss_token(content.batches[0])
    grad, _ = gradient(far.batches[0], SETTINGS, [list(range(7))])
    assert bool(grad.isfinite().all())
    capped = SETTINGS.replace(mismatch_token_clip_max=2.0)
    assert bool(gradient(far.batches[0], capped, [list(range(7))])[0].isfinite().all())
    (found,) = [f for f in examine(write(far).path).findings if f.code == "logratio-large"]
    assert (found.row, found.token) == (row, token)
    assert found.found == "old - rollout is -100 nats, the largest of 1 tokens beyond 10"


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("mode", MODES)
def test_b6_masked_rows_change_nothing(
    content: Content, mode: ValueAggType, denominator: DenominatorType
) -> None:
    """k rows without a loss token beside the others, in the same micro-batch and in one alone."""
    settings = SETTINGS.replace(loss_agg_type=mode, micro_batch_denominator_type=denominator)
    masked = mutate.masked_rows(content, 0, [1, 4]).batches[0]
    without, count = gradient(masked.select([0, 2, 3, 5, 6]), settings, [list(range(5))])
    beside, same = gradient(masked, settings, [list(range(7))])
    apart, also = gradient(masked, settings, [[0, 2, 3, 5, 6], [1, 4]])
    assert count == same == also > 0
    for grad in (beside, apart):
        # float32 sums over other lengths
        torch.testing.assert_close(grad[[0, 2, 3, 5, 6]], without, rtol=1e-5, atol=1e-8)
        assert not grad[[1, 4]].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value", [NAN, -INF, INF])
@pytest.mark.parametrize("column", ["old_logprobs", "rollout_logprobs", "advantage"])
def test_b7_what_is_not_finite_is_named(
    content: Content, column: str, value: float, masked: bool
) -> None:
    changed = mutate.not_finite(content, column, value, masked=masked)
    batch, parts = changed.batches[0], [list(range(7))]
    row, token = mutate.loss_token(content.batches[0], masked=masked)
    found = codes(batch) | {f.code: f for f in check_losses(batch, parts, FILE, content.settings)}
    named = found["masked-value-not-finite" if masked else "value-not-finite"]
    assert (named.dp_rank, named.row, named.token) == (0, row, token)
    assert named.found == f"{column} is {value} (1 such values)"
    # whether it reaches the loss is the trainer's own arithmetic, not a guess
    grad, _ = gradient(batch, content.settings, parts)
    assert ("loss-not-finite" in found) == (not bool(grad.isfinite().all()))
    if "loss-not-finite" in found:
        assert (found["loss-not-finite"].row, found["loss-not-finite"].token) == (row, token)


@pytest.mark.parametrize("mode", BY_FACTOR)
def test_b7_a_masked_nan_poisons_the_loss_as_the_trainers_does(
    content: Content, mode: ValueAggType
) -> None:
    batch = mutate.not_finite(content, "old_logprobs", NAN, masked=True).batches[0]
    policy = log_probs(batch)
    settings = SETTINGS.replace(loss_agg_type=mode)
    loss = micro_batch_loss(settings, batch, policy, torch.zeros_like(policy))
    assert math.isnan(float(loss.loss))
    selecting = SETTINGS.replace(loss_agg_type="token-max")
    assert math.isfinite(micro_batch_loss(selecting, batch, policy, torch.zeros_like(policy)).loss)


def test_b7_an_absent_column_is_named(write: Write, content: Content) -> None:
    changed = mutate.column_absent(content, "rollout_logprobs")
    found = [f for f in examine(write(changed).path).findings if f.code == "column-absent"]
    assert [(f.dp_rank, f.found) for f in found] == [
        (rank, "no column rollout_logprobs") for rank in (0, 1)
    ]
    policy = log_probs(content.batches[0])
    with pytest.raises(BatchError, match="column 'rollout_logprobs' is absent"):
        micro_batch_loss(SETTINGS, changed.batches[0], policy, torch.zeros_like(policy))


def test_b7_zeros_where_the_rollout_gave_nothing_are_seen(write: Write, content: Content) -> None:
    changed = mutate.not_finite(content, "rollout_logprobs", 0.0, masked=False)
    (found,) = [f for f in examine(write(changed).path).findings if f.code == "logprob-absent"]
    assert found.found == "1 of 75 loss tokens have exactly 0"


def four_rows(lengths: tuple[int, ...] = (40, 6, 5, 4)) -> RankBatch:
    """One long and three short rows."""
    long = mutate_values.steady_log_ratio(tokens=lengths[0])
    mask = torch.arange(lengths[0]) < torch.tensor(lengths).unsqueeze(1)
    loss = mask & mask.roll(-1, 1)
    loss[:, -1] = False
    wave = torch.sin(torch.arange(mask.numel()).float()).reshape(mask.shape)
    columns = {
        name: getattr(long, name).expand(mask.shape) + 0.1 * wave
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")
    }
    return long.replace(
        index=torch.arange(4),
        input_ids=mask.long(),
        labels=torch.where(loss, 1, -100),
        loss_mask=loss,
        attention_mask=mask,
        advantage=wave * loss,
        **columns,
    )


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_c9_the_grouping_matters_where_mean_and_denominator_count_different_things(
    denominator: DenominatorType,
) -> None:
    batch = four_rows()
    settings = SETTINGS.replace(micro_batch_denominator_type=denominator)
    grads = [gradient(batch, settings, mutate_values.regrouped(4, n))[0] for n in (1, 2, 4)]
    apart = [float((g - grads[0]).abs().max() / grads[0].abs().max()) for g in grads]
    if denominator == "token":
        assert max(apart) <= 1e-5  # summation order
    else:
        assert min(apart[1:]) > 0.1


def test_c9_the_trainers_own_split_puts_the_long_row_alone() -> None:
    """Golden values of the trainer's split are in tests/test_golden.py; here is what it does."""
    assert balanced_split(four_rows().lengths(), 40, 40) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("mode", MODES)
def test_c11_a_micro_batch_of_nothing(content: Content, mode: ValueAggType) -> None:
    nothing = mutate.masked_rows(content, 0, range(7)).batches[0]
    settings = SETTINGS.replace(loss_agg_type=mode)
    policy = log_probs(nothing).requires_grad_()
    loss = micro_batch_loss(settings, nothing, policy, torch.zeros_like(policy))
    assert int(loss.denominator) == 0
    (grad,) = torch.autograd.grad(loss.scaled, [policy])
    assert not bool(grad.any())  # zero and finite, in every mode
    if mode in ("token-max", "token-min"):
        assert math.isnan(float(loss.scaled.detach()))
    else:
        assert float(loss.scaled.detach()) == 0.0


@pytest.mark.parametrize(("mode", "told"), [("token-mean", False), ("token-max", True)])
def test_c11_the_doctor_tells_of_it(
    write: Write, content: Content, mode: ValueAggType, told: bool
) -> None:
    changed = mutate.with_settings(mutate.masked_rows(content, 1, range(7)), loss_agg_type=mode)
    found = [f for f in examine(write(changed).path).findings if f.code == "loss-of-nothing"]
    assert [f.dp_rank for f in found] == [1, 1]  # both of its micro-batches
    assert all((f"; {mode} of nothing gives the loss nan" in f.found) == told for f in found)


def test_c4_saved_settings_against_the_model_section(write: Write, content: Content) -> None:
    changed = mutate.worker_in_bfloat16(mutate.model_with_own_balance(content))
    found = [f.found for f in examine(write(changed).path).findings if f.code == "config-differs"]
    assert [text.partition(" (")[0] for text in found] == [
        "model.moe_aux_loss_coeff: run_config.yaml says 0.01, replayed is 0.0",
        "model.moe_router_load_balancing_type: run_config.yaml says 'aux_loss', replayed is 'none'",
        "model.bf16: run_config.yaml says False, replayed is True",
    ]


def test_c15_packed_lengths_of_context_parallel_ranks(write: Write, content: Content) -> None:
    found = {
        f.dp_rank: f
        for f in examine(write(mutate.context_parallel(content)).path).findings
        if f.code == "packed-length-uneven"
    }
    uneven = [n for n in content.batches[0].lengths() if n % 4]
    assert found[0].found == (
        f"{len(uneven)} of 7 rows are no multiple of 2 x 2 tokens long, the first one {uneven[0]}"
    )


def test_c17_norm_before_and_after_clipping_and_the_coefficient() -> None:
    norm, bound = 8.441921403762574, 1.0
    after, coefficient = mutate_values.clipped_at(norm, bound)
    assert clip_coefficient(norm, bound) == coefficient
    assert norm * clip_coefficient(norm, bound) == after == pytest.approx(1.0, rel=1e-6)
    assert [clip_coefficient(norm, b) for b in (None, 0.0, 10.0)] == [1.0, 1.0, 1.0]


def test_answers_of_one_process_are_read_as_such() -> None:
    with pytest.raises(AssertionError):
        _ = Answer(error={"code": "batch", "message": "refused"}).baseline
