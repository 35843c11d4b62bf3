"""The step comes out as it was recorded, and an experiment leaves no trace."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import BatchError, EngineError, PatchError
from replay_lib.patch import Seam
from replay_lib.run import RECORDED_METHODS

pytestmark = pytest.mark.xdist_group("engine-plain")

RECORDED = 8.441921403762574  # axrl_metadata.json of the embedded snapshot
BASELINE = Experiment.baseline()
METHODS = sorted(RECORDED_METHODS)
SEAMS = {
    Seam.WEIGHTS: "seam_examples:scaled_router",
    Seam.MODEL: "seam_examples:scaled_topk",
    Seam.ROUTING: "seam_examples:even_rows_replay",
    Seam.ROUTER: "seam_examples:half_sure_replay",
    Seam.BATCH: "seam_examples:smaller_advantage",
    Seam.SETTINGS: "seam_examples:sequence_mean",
    Seam.TOKEN_WEIGHTS: "seam_examples:weighted_tokens",
}


@pytest.fixture(scope="module")
def baseline(plain):
    return plain.run(BASELINE)


def test_the_recorded_norm_comes_out_folded_onto_one_rank(plain, baseline):
    assert plain.info.fidelity == "folded"
    assert (plain.info.dp_ranks, plain.info.layout["dp"]) == ((0, 1), 1)
    # float32 sums in another order than two ranks' reduce-scatter: parts in 1e7
    assert abs(baseline.grad_norm_preclip / RECORDED - 1) <= 1e-6
    assert baseline.nonfinite == ()
    assert baseline.touched == {} and baseline.retained is None


def test_two_sessions_are_bit_equal(plain_path, baseline):
    with ReplaySession.open(plain_path, device="cpu") as other:
        assert other.run(BASELINE).digest == baseline.digest


def test_two_ranks_give_the_full_step(plain_path, baseline):
    with ReplaySession.open(plain_path, device="cpu", layout="dp=2") as both:
        assert both.info.fidelity == "full"
        outcomes = list(both.run_many([BASELINE, Experiment.parse("disable-routing-replay")]))
        peaks, held = both.peak_memory(), both.info.parameters * 4 * 2  # weights and gradients
    assert len(peaks) == 2 and held <= min(peaks)
    assert max(peaks) <= 2**34  # bytes, not KiB or pages
    assert abs(outcomes[0].grad_norm_preclip / baseline.grad_norm_preclip - 1) <= 1e-6
    assert outcomes[1].touched == {Seam.ROUTING: 1052}  # counted over both ranks
    assert outcomes[1].retained.smallest > 0.9


def test_one_data_parallel_rank_of_two_is_reduced(plain_path, baseline):
    with ReplaySession.open(plain_path, device="cpu", dp_ranks=[1]) as one:
        assert one.info.fidelity == "reduced"
        assert abs(one.run(BASELINE).grad_norm_preclip / baseline.grad_norm_preclip - 1) > 0.1


def test_the_whole_norm_is_that_of_the_parameters(baseline):
    total = sum(norm**2 for norm in baseline.param_norms.values()) ** 0.5
    assert total == pytest.approx(baseline.grad_norm_preclip, rel=1e-12)
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in baseline.param_norms
    assert "decoder.layers.3.mlp.experts.linear_fc1.weight" in baseline.param_norms


@pytest.mark.parametrize("name", [*METHODS, *SEAMS.values()])
def test_every_method_acts_and_the_baseline_comes_out_again(plain, baseline, name):
    outcome = plain.run(Experiment.parse(name))
    assert outcome.digest != baseline.digest
    assert all(count > 0 for count in outcome.touched.values()) and outcome.touched
    assert plain.run(BASELINE).digest == baseline.digest


@pytest.mark.parametrize("pair", list(combinations(SEAMS, 2)), ids="-".join)
def test_every_pair_of_seams_combines_and_leaves_no_trace(plain, baseline, pair):
    together = plain.run(Experiment.parse("+".join(SEAMS[s] for s in pair)))
    apart = [plain.run(Experiment.parse(SEAMS[s])) for s in pair]
    assert set(together.touched) == set(pair)
    assert len({together.digest, baseline.digest, *(o.digest for o in apart)}) == 4
    assert plain.run(BASELINE).digest == baseline.digest


def test_experiments_that_share_a_forward_equal_those_that_do_not(plain):
    names = ["baseline", *METHODS, SEAMS[Seam.BATCH], SEAMS[Seam.TOKEN_WEIGHTS]]
    together = list(plain.run_many([Experiment.parse(n) for n in names]))
    assert [o.experiment.name for o in together] == names
    assert sum(o.shared_forward for o in together) in (4, 5)  # a first baseline stands alone
    for name, outcome in zip(names, together, strict=True):
        assert plain.run(Experiment.parse(name)).digest == outcome.digest, name


def test_the_order_of_experiments_does_not_matter(plain):
    names = [SEAMS[Seam.WEIGHTS], "disable-routing-replay", SEAMS[Seam.SETTINGS]]
    digests = {
        tuple(sorted((o.experiment.name, o.digest) for o in plain.run_many(experiments)))
        for order in permutations(names)
        if (experiments := [Experiment.parse(n) for n in order])
    }
    assert len(digests) == 1


def test_entropies_are_computed_where_a_setting_wants_them(plain, baseline):
    plainly, with_bonus = plain.run_many(
        [BASELINE, Experiment.parse("seam_examples:entropy_bonus")]
    )
    assert plainly.digest == baseline.digest != with_bonus.digest
    assert not with_bonus.shared_forward


def test_a_patch_of_the_forward_is_also_run_with_carried_old_log_probabilities(plain):
    routed, loss_only = plain.run_many(
        [Experiment.parse("disable-routing-replay"), Experiment.parse(SEAMS[Seam.BATCH])]
    )
    assert routed.grad_norm_preclip_carried not in (None, routed.grad_norm_preclip)
    assert routed.retained_carried is not None
    assert loss_only.grad_norm_preclip_carried is None


def test_a_controlled_comparison_keeps_its_own_reference(plain):
    plainly = plain.run(Experiment.parse(SEAMS[Seam.TOKEN_WEIGHTS]))
    controlled = plain.run(Experiment.parse(SEAMS[Seam.TOKEN_WEIGHTS], against=SEAMS[Seam.BATCH]))
    assert plainly.retained.advantage == pytest.approx(0.5)
    assert controlled.retained.advantage == pytest.approx(1.0)  # a quarter is all that was there


def test_what_a_mask_keeps_is_told(plain):
    nothing = plain.run(Experiment.parse("seam_examples:keeps_nothing"))
    assert nothing.grad_norm_preclip == 0.0
    assert (nothing.retained.tokens, nothing.retained.smallest) == (0.0, 0.0)


def test_a_nan_is_named_with_its_rank_row_and_token(plain):
    outcome = plain.run(Experiment.parse("seam_examples:nan_advantage"))
    assert outcome.grad_norm_preclip != outcome.grad_norm_preclip
    assert outcome.nonfinite[0].startswith("dLoss/dlogprob of dp rank 0 row ")
    assert "embedding.word_embeddings.weight" in outcome.nonfinite


WRITERS = (
    "writes_into_the_batch",
    "writes_into_the_mask_of_another_seam",
    "writes_into_the_log_probabilities",
    "writes_into_the_weights",
)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_patch_that_writes_into_its_input_harms_no_other_experiment(plain, writer):
    names = [SEAMS[Seam.BATCH], "enable-token-mismatch-tis-max2", "disable-routing-replay"]
    alone = {n: plain.run(Experiment.parse(n)).digest for n in ("baseline", *names)}
    group = [names[0], f"seam_examples:{writer}", *names[1:], "baseline"]
    together = list(plain.run_many([Experiment.parse(n) for n in group]))
    assert together[1].digest != alone["baseline"]
    assert all(count > 0 for count in together[1].touched.values())
    for outcome in (together[0], *together[2:]):
        assert outcome.digest == alone[outcome.experiment.name], outcome.experiment.name


def test_a_request_inside_an_unfinished_one_is_refused(plain, baseline):
    outcomes = plain.run_many([Experiment.parse(n) for n in METHODS])
    next(outcomes)
    with pytest.raises(EngineError, match="another run of this session is unfinished"):
        plain.run(BASELINE)
    outcomes.close()
    assert plain.run(BASELINE).digest == baseline.digest


def test_entropy_over_few_logits_is_finite_and_not_shared_with_another_top_k(plain):
    names = [f"seam_examples:entropy_of_few:top_k={k}" for k in (7, 2)]
    alone = [plain.run(Experiment.parse(n)) for n in names]
    together = list(plain.run_many([Experiment.parse(n) for n in names]))
    assert all(o.nonfinite == () and o.grad_norm_preclip > 0 for o in alone)
    assert [o.digest for o in together] == [o.digest for o in alone]
    assert alone[0].digest != alone[1].digest


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seam_examples:writes_into_the_tokens", "elements of input_ids, which the model reads"),
        ("seam_examples:other_routes", "a batch patch changed routes"),
        ("seam_examples:not_a_tensor", "gave advantage as str, expected a tensor"),
        ("seam_examples:no_weights", "must return a tensor"),
        ("seam_examples:no_parameters", "must return a dict of tensors, not NoneType"),
        ("seam_examples:unknown_score", "moe_router_score_function: found 'tanh'"),
        ("seam_examples:impossible_groups", "the model cannot run with the fields"),
        ("seam_examples:leaving", "a patch at the batch seam raised SystemExit: 3"),
        ("no-such-method", "mitigation no-such-method: not registered; known: "),
        ("enable-token-mismatch-tis-max2:cap=3", "unknown parameter cap; known: clip_max=2.0"),
        ("seam_examples:other_tokens", "elements of input_ids, which the model reads"),
        ("seam_examples:wrong_shape", "must return a bool tensor"),
        ("seam_examples:frozen_field", "'hidden_size' cannot be changed on a live model"),
        ("seam_examples:raising", "a patch at the batch seam raised TypeError: "),
        ("seam_examples:unknown_weight", "'no.such.weight', which the model does not have"),
    ],
)
def test_a_bad_patch_is_one_error_and_the_session_goes_on(plain, baseline, name, words):
    with pytest.raises(PatchError) as caught:
        plain.run(Experiment.parse(name))
    assert words in str(caught.value)
    assert plain.run(BASELINE).digest == baseline.digest


def test_taking_only_some_outcomes_leaves_the_session_usable(plain, baseline):
    outcomes = plain.run_many([Experiment.parse(n) for n in METHODS])
    next(outcomes)
    outcomes.close()
    assert plain.run(BASELINE).digest == baseline.digest


def test_error_classes_survive_the_process_boundary(plain_path):
    from replay_lib.errors import UsageError

    with pytest.raises(UsageError, match="no data-parallel ranks \\[7\\]; the run had 0 to 1"):
        ReplaySession.open(plain_path, device="cpu", dp_ranks=[7])
    assert BatchError.code == "batch"
