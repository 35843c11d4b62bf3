"""The float64 oracle against finite differences, its own invariants, and a recorded step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_step import FIELDS, SETTINGS, E, K, L, assert_same, make_batch, make_weights, run, unstack
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine import reference_model
from replay_lib.engine.reference import reference_step
from replay_lib.engine.reference_model import logits, read_model, route
from replay_lib.errors import BatchError, WeightsError
from replay_lib.microbatch import split_ranks
from replay_lib.snapshot import load_batch, load_model_fields, load_settings, open_snapshot
from replay_lib.snapshot.checkpoint import read_tensors

SNAPSHOT = Path(__file__).parents[2] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


VARIANTS = {
    "softmax-after-topk": {},
    "softmax-before-topk": {"moe_router_pre_softmax": True},
    "scaled": {"moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "half-rotary": {"rotary_percent": 0.5},
    "own-attention-scale": {"softmax_scale": 0.3},
    "tied": {"share_embeddings_and_output_weights": True},
    "no-qk-layernorm": {"qk_layernorm": False},
    "first-layer-dense": {"moe_layer_freq": [0, 1]},
}


def weights_of(variant: str) -> dict[str, Tensor]:
    weights = make_weights()
    if variant == "tied":
        del weights["output_layer.weight"]
    if variant == "no-qk-layernorm":
        weights = {n: t for n, t in weights.items() if "q_layernorm" not in n}
        weights = {n: t for n, t in weights.items() if "k_layernorm" not in n}
    return unstack(weights, dense=[0]) if variant == "first-layer-dense" else weights


@pytest.mark.parametrize("forced", [True, False], ids=["saved-routes", "current-routes"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_finite_differences_on_every_parameter(variant, forced):
    weights, fields = weights_of(variant), VARIANTS[variant]
    step = run(weights, forced=forced, **fields)
    generator = torch.Generator().manual_seed(1)
    small = 1e-5
    assert set(step.gradients) == set(weights)
    for name, tensor in weights.items():
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        losses = [
            run(weights | {name: tensor + sign * small * direction}, forced=forced, **fields).loss
            for sign in (1, -1)
        ]
        slope = (losses[0] - losses[1]) / (2 * small)
        expected = float((step.gradients[name] * direction).sum())
        # truncation of a central difference is of order small^2, cancellation 1e-16 / small
        assert math.isclose(slope, expected, rel_tol=1e-5, abs_tol=1e-8), name
        assert step.param_norms[name] > 0, name


def test_the_norm_is_that_of_all_gradients_together():
    step = run()
    flat = torch.cat([g.flatten() for g in step.gradients.values()])
    assert math.isclose(step.grad_norm_preclip, float(flat.norm()), rel_tol=1e-12)


def test_forcing_the_models_own_choice_changes_nothing_and_other_experts_do():
    weights, batch = make_weights(), make_batch()
    current = run(weights, batch, forced=False)
    own = own_routes(weights, batch)
    assert_same(run(weights, batch.replace(routes=own), forced=True), current)
    swapped = tuple((r + 1) % E for r in own)
    other = run(weights, batch.replace(routes=swapped), forced=True)
    assert abs(other.grad_norm_preclip / current.grad_norm_preclip - 1) > 1e-3


def own_routes(weights: dict[str, Tensor], batch: RankBatch) -> tuple[Tensor, ...]:
    """Experts that the model chooses by itself, noted as its routers choose them."""
    seen: list[Tensor] = []

    def noting(*arguments):
        chosen_NK, probs_NK = route(*arguments)
        seen.append(chosen_NK.view(batch.rows, batch.width, K))
        return chosen_NK, probs_NK

    saved = torch.arange(K).expand(batch.rows, batch.width, L, K)
    none = torch.zeros(batch.rows, batch.width, L, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_model, "route", noting)
        logits(read_model(FIELDS), weights, batch.input_ids, saved, none)
    routes_BTLK = torch.stack(seen, dim=2)
    return tuple(routes_BTLK[b, : n - 1] for b, n in enumerate(batch.lengths()))


def test_a_mask_forces_single_tokens_and_layers():
    batch = make_batch()
    own = own_routes(make_weights(), batch)
    batch = batch.replace(routes=tuple((r + 1) % E for r in own))
    forced = torch.zeros(3, 6, L, dtype=torch.bool)
    current = run(batch=batch, forced=forced)
    forced[1, 0, 1] = True
    last_layer = run(batch=batch, forced=forced)
    # a prompt token's experts in the last layer reach no loss token
    assert_same(last_layer, current)
    forced[1, 0, 0] = True
    first_layer = run(batch=batch, forced=forced)
    assert abs(first_layer.grad_norm_preclip / current.grad_norm_preclip - 1) > 1e-4
    # rows do not see each other
    assert torch.equal(first_layer.log_prob[0][[0, 2]], current.log_prob[0][[0, 2]])


def test_by_default_saved_routes_are_forced_at_every_real_token():
    batch = make_batch()
    default = reference_step(make_weights(), FIELDS, [batch], SETTINGS, [[[0, 1], [2]]])
    forced = batch.attention_mask[:, :, None].expand(-1, -1, L)
    assert_same(default, run(batch=batch, forced=forced))


def test_padding_changes_nothing():
    narrow, wide = make_batch(width=6), make_batch(width=6)
    columns = {}
    for name in ("input_ids", "labels", "loss_mask", "attention_mask", "advantage"):
        columns[name] = torch.nn.functional.pad(getattr(wide, name), (0, 5))
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
        columns[name] = torch.nn.functional.pad(getattr(wide, name), (0, 5))
    one, other = run(batch=narrow), run(batch=wide.replace(**columns))
    assert_same(one, other)
    assert torch.equal(other.log_prob[0][:, 6:], torch.zeros(3, 5, dtype=torch.float64))


def test_ranks_are_summed_and_divided_once():
    whole = make_batch()
    first, second = whole.select([0, 1]), whole.select([2])
    split = reference_step(make_weights(), FIELDS, [first, second], SETTINGS, [[[0, 1]], [[0]]])
    assert_same(split, reference_step(make_weights(), FIELDS, [whole], SETTINGS, [[[0, 1], [2]]]))
    # tokens that train: the lengths 5, 3, 4 less the first and the last position
    assert split.denominator == 3 + 1 + 2
    assert [tuple(p.shape) for p in split.log_prob] == [(2, 6), (1, 6)]


def test_the_partition_matters_where_mean_and_denominator_count_different_things():
    settings = SETTINGS.replace(micro_batch_denominator_type="sequence")
    apart = run(partition=[[0], [1], [2]], settings=settings)
    together = run(partition=[[0, 1, 2]], settings=settings)
    assert abs(apart.grad_norm_preclip / together.grad_norm_preclip - 1) > 1e-3


def test_token_weights_multiply_the_policy_term():
    batch, weights = make_batch(), make_weights()
    arguments = (weights, FIELDS, [batch], SETTINGS, [[[0, 1], [2]]])
    plain = reference_step(*arguments)
    double = reference_step(*arguments, token_weights=[torch.full((3, 6), 2.0)])
    assert math.isclose(double.grad_norm_preclip, 2 * plain.grad_norm_preclip, rel_tol=1e-12)


def test_layers_that_are_not_stacked_give_the_same_step():
    stacked, single = run(), run(unstack(make_weights()))
    assert math.isclose(stacked.grad_norm_preclip, single.grad_norm_preclip, rel_tol=1e-12)


def test_both_names_of_the_moe_norm_are_known():
    weights = make_weights()
    renamed = dict(weights)
    name = "decoder.layers.pre_mlp_layernorm.weight"
    other = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    renamed[other] = renamed.pop(name)
    one, two = run(weights), run(renamed)
    assert torch.equal(one.gradients[name], two.gradients[other])


def test_a_missing_parameter_is_named():
    weights = make_weights()
    del weights["decoder.final_layernorm.weight"]
    with pytest.raises(WeightsError) as caught:
        run(weights)
    assert str(caught.value) == (
        "weights: decoder.final_layernorm.weight: found nothing, expected a parameter of the model"
    )


def test_a_parameter_of_no_use_is_named():
    with pytest.raises(WeightsError) as caught:
        run(make_weights() | {"decoder.layers.mlp.router.bias": torch.zeros(L, E)})
    assert str(caught.value) == (
        "weights: found decoder.layers.mlp.router.bias, expected parameters of the model"
    )


def test_routes_that_are_not_there_cannot_be_forced():
    batch = make_batch()
    without = batch.replace(routes=(batch.routes[0], None, batch.routes[2]))
    with pytest.raises(BatchError) as caught:
        run(batch=without, forced=True)
    assert str(caught.value) == (
        "batch of dp rank 0: routes[1]: found none, expected routes to be forced"
    )


def test_a_partition_that_loses_a_row_is_refused():
    with pytest.raises(BatchError) as caught:
        run(partition=[[0, 1]])
    assert str(caught.value) == (
        "partition of dp rank 0: rows: found [0, 1], expected each of 0..2 once"
    )


@pytest.fixture(scope="module")
def recorded() -> dict[str, object]:
    snapshot = open_snapshot(SNAPSHOT)
    batches = [load_batch(snapshot, rank) for rank in range(snapshot.parallel.dp)]
    partition = split_ranks(
        [b.lengths() for b in batches],
        [b.width for b in batches],
        dynamic=snapshot.worker.use_dynamic_batch_size,
        micro_batch_size=snapshot.worker.train_micro_batch_size,
        seq_length=snapshot.worker.seq_length,
    )
    return {
        "norm": snapshot.grad_norm_preclip,
        "arguments": (
            read_tensors(SNAPSHOT),
            load_model_fields(snapshot),
            batches,
            load_settings(snapshot),
            partition,
        ),
    }


def test_the_recorded_step_comes_out_with_its_recorded_norm(recorded):
    step = reference_step(*recorded["arguments"])
    assert recorded["norm"] == 8.441921403762574
    # float32 training on two ranks; an independent computation was 1.3e-7 away
    assert abs(step.grad_norm_preclip / recorded["norm"] - 1) <= 1e-6


def test_the_recorded_norm_needs_the_recorded_routes(recorded):
    """Negative control: routes shifted by one row must not give the recorded norm."""
    weights, fields, batches, settings, partition = recorded["arguments"]
    shifted = [
        b.replace(routes=tuple(r if r is None else r.roll(1, dims=0) for r in b.routes))
        for b in batches
    ]
    step = reference_step(weights, fields, shifted, settings, partition)
    assert abs(step.grad_norm_preclip / recorded["norm"] - 1) > 1e-3
