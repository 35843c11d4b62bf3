"""The whole loss: errors, composition, and what must not change it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import make_rows, random_rows

from replay_lib.errors import BatchError
from replay_lib.loss import GrpoSettings, micro_batch_loss

# every loss with settings that it accepts, filters on
LOSSES = {
    "grpo": {"icepop_masking_low": 0.8},
    "ppo": {"mismatch_token_clip_max": 1.1},
    "tis": {"mismatch_seq_masking_low": 0.9},
    "gspo": {"loss_agg_type": "seq-mean-token-mean"},
    "grpo2": {"mismatch_token_veto_threshold": 0.5, "kl_control_alpha": 0.1},
    "topr": {"entropy_control": {"alpha": 0.1, "top_quantile": 0.5}},
    "kimi2_5": {"is_base_logprobs": "rollout_logprobs"},
}
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-std", "token-std"]
# KL is summed in float32 (6e-8 a step) even where the rest is float64
IN_ANOTHER_ORDER = {"rtol": 1e-6, "atol": 1e-7}
DENOMINATORS = ["token", "sequence", "seq_turn"]


def run(settings, rows, log_prob, entropy, weight=None):
    """The loss, and the gradients of ``scaled``."""
    log_prob, entropy = log_prob.clone().requires_grad_(), entropy.clone().requires_grad_()
    result = micro_batch_loss(settings, rows, log_prob, entropy, weight)
    result.scaled.backward()
    return result, log_prob.grad, entropy.grad


def settings_of(loss_type, **more):
    return GrpoSettings(loss_type=loss_type, **{**LOSSES[loss_type], **more})


@pytest.mark.parametrize(
    "column", ["rollout_logprobs", "old_logprobs", "ref_logprobs", "labels", "advantage"]
)
def test_an_absent_column_is_named(column):
    rows, log_prob, entropy = random_rows(0)
    with pytest.raises(BatchError) as error:
        micro_batch_loss(GrpoSettings(), rows.replace(**{column: None}), log_prob, entropy)
    assert str(error.value) == (
        f"batch of dp rank 0: column {column!r} is absent, but the loss settings need it. Check "
        "the trainer's options that write it."
    )


def test_all_columns_that_do_not_fit_are_named_at_once():
    rows, log_prob, entropy = random_rows(0)
    wrong = rows.replace(advantage=rows.advantage[:, 0], labels=rows.labels[:, :5])
    with pytest.raises(BatchError) as error:
        micro_batch_loss(GrpoSettings(), wrong, log_prob, entropy)
    assert str(error.value) == (
        "batch of dp rank 0: found labels [3, 5] on cpu; advantage [3] on cpu, expected [3, 6] on "
        "cpu, as log_prob"
    )


def test_a_column_that_is_too_long_is_named_too():
    rows, log_prob, entropy = random_rows(0)
    wide = rows.replace(advantage=torch.zeros(3, 7))
    with pytest.raises(
        BatchError, match=r"found advantage \[3, 7\] on cpu, expected \[3, 6\] on cpu"
    ):
        micro_batch_loss(GrpoSettings(), wide, log_prob, entropy)


@pytest.mark.parametrize("shape", [(18,), (1, 3, 6)])
def test_log_probabilities_are_rows_of_tokens(shape):
    rows, log_prob, entropy = random_rows(0)
    with pytest.raises(BatchError, match=f"log_prob: found {len(shape)} dimensions, expected two"):
        micro_batch_loss(GrpoSettings(), rows, log_prob.reshape(shape), entropy)


def test_half_precision_log_probabilities_are_refused():
    rows, log_prob, entropy = random_rows(0)
    with pytest.raises(BatchError, match=r"log_prob: found torch\.bfloat16, expected torch\.float"):
        micro_batch_loss(GrpoSettings(), rows, log_prob.bfloat16(), entropy)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_micro_batch_without_loss_tokens_is_zero_not_nan(loss_type):
    rows, log_prob, entropy = random_rows(2)
    empty = rows.replace(loss_mask=torch.zeros_like(rows.loss_mask))
    result, grad, _ = run(settings_of(loss_type, kl_control_alpha=0.5), empty, log_prob, entropy)
    # the entropy term is (target - 0)^2 * alpha, and the denominator takes it away
    assert result.metrics["loss"] == pytest.approx(0.001 if loss_type == "topr" else 0.0)
    assert int(result.denominator) == 0
    assert float(result.scaled.detach()) == 0.0
    assert not grad.any()


def test_token_max_over_an_empty_micro_batch_is_nan_once_scaled():
    rows = make_rows([[0, 0]])
    settings = GrpoSettings(loss_type="tis", loss_agg_type="token-max")
    result = micro_batch_loss(settings, rows, torch.full((1, 2), -1.0), torch.zeros(1, 2))
    assert math.isnan(result.scaled)


def test_the_terms_add_up_and_are_scaled_by_the_denominator():
    rows, log_prob, entropy = random_rows(3)
    settings = GrpoSettings(
        kl_control_alpha=0.3,
        entropy_control={"alpha": 0.2},
        micro_batch_denominator_type="sequence",
    )
    result, _, _ = run(settings, rows, log_prob, entropy)
    m = result.metrics
    expected = m["pg_loss"] + 0.2 * m["entropy_loss"] + 0.3 * m["kl_loss"]
    assert m["loss"] == pytest.approx(expected, rel=1e-6)
    assert result.scaled.item() == pytest.approx(3 * m["loss"], rel=1e-6)
    assert m["denom"] == 3.0


def test_filters_touch_neither_denominator_nor_the_mean():
    rows = make_rows([[1, 1, 1, 1]], old_logprobs=[[-1.0, -1.0, -1.0, -4.0]])
    log_prob = rows.old_logprobs.clone()
    settings = GrpoSettings(loss_type="topr", icepop_masking_low=0.5)
    result, grad, _ = run(settings, rows, log_prob, torch.zeros(1, 4))
    assert result.keep_BT.tolist() == [[True, True, True, False]]
    assert result.policy_weight_BT.tolist() == [[1.0, 1.0, 1.0, 0.0]]
    assert int(result.denominator) == 4
    assert result.metrics["loss"] == pytest.approx(3 / 4)  # -A log_prob of three tokens over four
    assert grad.tolist() == [[-1.0, -1.0, -1.0, 0.0]]


def test_token_weights_multiply_the_policy_term_alone():
    rows, log_prob, entropy = random_rows(4)
    settings = GrpoSettings(kl_control_alpha=0.3, entropy_control={"alpha": 0.2})
    plain, _, _ = run(settings, rows, log_prob, entropy)
    halved, _, _ = run(settings, rows, log_prob, entropy, torch.full_like(log_prob, 0.5))
    ones, _, _ = run(settings, rows, log_prob, entropy, torch.ones_like(log_prob))
    assert halved.metrics["pg_loss"] == pytest.approx(plain.metrics["pg_loss"] / 2)
    assert halved.metrics["kl_loss"] == plain.metrics["kl_loss"]
    assert halved.metrics["entropy_loss"] == plain.metrics["entropy_loss"]
    assert int(halved.denominator) == int(plain.denominator)
    assert torch.equal(halved.policy_weight_BT, plain.policy_weight_BT / 2)
    assert torch.equal(ones.scaled, plain.scaled)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_what_the_loss_was_made_of_is_detached_and_zero_off_the_mask(loss_type):
    rows, log_prob, entropy = random_rows(5)
    result, _, _ = run(settings_of(loss_type), rows, log_prob, entropy)
    assert not result.policy_weight_BT.requires_grad
    assert not result.policy_weight_BT[~rows.loss_mask].any()
    assert not result.keep_BT[~rows.loss_mask].any()
    assert not result.policy_weight_BT[~result.keep_BT].any()


@pytest.mark.parametrize("loss_type", LOSSES)
@given(
    seed=st.integers(0, 10_000),
    padding=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    units=st.tuples(st.sampled_from(MODES), st.sampled_from(DENOMINATORS)),
)
def test_padding_rows_and_tails_change_nothing(loss_type, seed, padding, units):
    rows, log_prob, entropy = random_rows(seed)
    mode = "seq-mean-token-mean" if loss_type == "gspo" else units[0]
    fields = {"loss_agg_type": mode, "micro_batch_denominator_type": units[1]}
    settings = settings_of(loss_type, seq_turn_alpha=0.5, **fields)

    def padded(value):
        return torch.nn.functional.pad(value, (0, padding[1], 0, padding[0]))

    names = ("advantage", "old_logprobs", "rollout_logprobs", "ref_logprobs", "turn_index")
    wide = make_rows(padded(rows.loss_mask), **{n: padded(getattr(rows, n)) for n in names})
    before, grad, _ = run(settings, rows, log_prob.double(), entropy.double())
    after, wide_grad, _ = run(settings, wide, padded(log_prob.double()), padded(entropy.double()))
    assert int(after.denominator) == int(before.denominator)
    assert torch.equal(after.keep_BT, padded(before.keep_BT))
    assert after.scaled.item() == pytest.approx(before.scaled.item(), rel=1e-6, abs=1e-6)
    assert torch.allclose(wide_grad, padded(grad), **IN_ANOTHER_ORDER)


@given(seed=st.integers(0, 10_000), cut=st.integers(1, 3))
def test_with_token_means_and_denominators_the_split_does_not_matter(seed, cut):
    rows, log_prob, entropy = random_rows(seed, rows=4)
    settings = GrpoSettings(kl_control_alpha=0.1)
    _, whole, _ = run(settings, rows, log_prob.double(), entropy.double())
    parts = [list(range(cut)), list(range(cut, 4))]
    grads = [
        run(settings, rows.select(p), log_prob[p].double(), entropy[p].double())[1] for p in parts
    ]
    assert torch.allclose(torch.cat(grads), whole, **IN_ANOTHER_ORDER)


def test_the_inputs_are_left_as_they_were():
    rows, log_prob, entropy = random_rows(6)
    kept = {n: getattr(rows, n).clone() for n in ("advantage", "old_logprobs", "loss_mask")}
    run(GrpoSettings(mismatch_token_clip_max=1.0), rows, log_prob, entropy)
    assert all(torch.equal(getattr(rows, n), value) for n, value in kept.items())
