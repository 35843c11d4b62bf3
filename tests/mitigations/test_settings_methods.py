"""Methods that change loss settings or fields of the model: exactly these, and valid ones."""

from __future__ import annotations

import pytest
from hand_made import METHODS, only_patch

from replay_lib.errors import PatchError, SettingsError
from replay_lib.loss import GrpoSettings
from replay_lib.patch import Seam

#: What each method sets with its default parameters.
SETTINGS = {
    "add-entropy-control": {"entropy_control": {"alpha": 0.1, "target_entropy": 0.1}},
    "add-kl-to-reference": {"kl_control_alpha": 0.01, "kl_base_logprobs": "ref_logprobs"},
    "enable-token-mismatch-tis-below-one": {"mismatch_token_clip_max": 1.0},
    "enable-token-mismatch-tis-max2": {"mismatch_token_clip_max": 2.0},
    "enable-token-mismatch-tis-max5": {"mismatch_token_clip_max": 5.0},
    "mask-sequences-by-mismatch": {
        "mismatch_seq_masking_low": 0.98,
        "mismatch_seq_masking_high": 1.02,
    },
    "mask-tokens-by-icepop": {"icepop_masking_low": 0.5, "icepop_masking_high": 2.0},
    "tighten-dual-clip": {"dual_soft_clip": 1.5, "dual_clip_neg_adv_factor": 1.5},
    "tighten-ratio-clip": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    "use-grpo-loss": {"loss_type": "grpo"},
    "use-gspo-loss": {"loss_type": "gspo", "loss_agg_type": "seq-mean-token-mean"},
    "use-kimi-loss": {
        "loss_type": "kimi2_5",
        "is_base_logprobs": "rollout_logprobs",
        "mismatch_token_clip_max": None,
    },
    "use-old-logprobs-as-ratio-base": {"is_base_logprobs": "old_logprobs"},
    "use-rollout-logprobs-as-ratio-base": {"is_base_logprobs": "rollout_logprobs"},
    "use-sequence-denominator": {"micro_batch_denominator_type": "sequence"},
    "use-sequence-mean-aggregation": {"loss_agg_type": "seq-mean-token-mean"},
    "use-sequence-turn-denominator": {
        "micro_batch_denominator_type": "seq_turn",
        "seq_turn_alpha": 1.0,
    },
    "use-tis-loss": {"loss_type": "tis"},
    "use-topr-loss": {"loss_type": "topr"},
    "veto-sequences-by-token-mismatch": {"mismatch_token_veto_threshold": 1e-4},
}
MODEL = {
    "add-load-balancing-loss": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "add-router-z-loss": {"moe_z_loss_coeff": 0.001},
    "compute-router-in-float64": {"moe_router_dtype": "fp64"},
    "disable-router-losses": {
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_load_balancing_type": "none",
    },
    "use-sigmoid-router-scores": {"moe_router_score_function": "sigmoid"},
}
#: Other settings than a method's own: each field that it sets differs from what it sets.
ELSEWHERE = GrpoSettings(
    loss_type="tis",
    is_base_logprobs="rollout_logprobs",
    mismatch_token_clip_max=7.0,
    kl_control_alpha=0.5,
)


def test_every_method_of_these_seams_is_listed_here():
    of = {slug: m.seams for slug, m in METHODS.items()}
    assert set(SETTINGS) == {s for s, seams in of.items() if seams == (Seam.SETTINGS,)}
    assert set(MODEL) == {s for s, seams in of.items() if seams == (Seam.MODEL,)}


@pytest.mark.parametrize("slug", SETTINGS)
@pytest.mark.parametrize("before", [GrpoSettings(), ELSEWHERE])
def test_it_sets_these_fields_and_nothing_else(slug, before):
    assert only_patch(slug).apply(before) == before.replace(**SETTINGS[slug])


@pytest.mark.parametrize("slug", SETTINGS)
def test_the_settings_are_ones_that_the_trainer_takes(slug):
    only_patch(slug).apply(GrpoSettings()).check()


def test_what_the_loss_cannot_combine_is_told_by_the_settings_themselves():
    ppo = GrpoSettings(loss_type="ppo")
    with pytest.raises(SettingsError, match="expected old_logprobs for loss_type ppo"):
        only_patch("use-rollout-logprobs-as-ratio-base").apply(ppo).check()


@pytest.mark.parametrize("slug", MODEL)
def test_it_sets_these_fields_of_the_model(slug):
    assert only_patch(slug).apply({}) == MODEL[slug]


def test_what_changes_the_unit_or_the_meaning_says_so():
    assert {s for s, m in METHODS.items() if m.changes_unit} == {
        "normalise-advantages",
        "use-gspo-loss",
        "use-sequence-denominator",
        "use-sequence-mean-aggregation",
        "use-sequence-turn-denominator",
    }
    assert {s for s, m in METHODS.items() if m.diagnostic} == {
        "disable-router-losses",
        "disable-routing-replay",
        "replay-r3-on-prompt-tokens-only",
        "use-initial-model",
        "use-sigmoid-router-scores",
    }


@pytest.mark.parametrize(
    ("slug", "params", "said"),
    [
        ("add-entropy-control", {"alpha": 0.0}, "expected > 0"),
        ("add-kl-to-reference", {"alpha": -1.0}, "expected > 0"),
        ("add-load-balancing-loss", {"coeff": 0.0}, "expected > 0"),
        ("add-router-z-loss", {"coeff": 0.0}, "expected > 0"),
        ("tighten-dual-clip", {"bound": 1.0}, "expected > 1"),
        ("tighten-ratio-clip", {"low": 1.5}, "expected 0 < low <= 1 and high > 0"),
        ("use-sequence-turn-denominator", {"alpha": 2.0}, "expected 0 to 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(slug, params, said):
    with pytest.raises(PatchError, match=f"mitigation {slug}: found .*{said}"):
        METHODS[slug].patches(params)
