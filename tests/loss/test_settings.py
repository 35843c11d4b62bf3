"""Settings: AXRL's names and defaults, strict, with errors that say what to do."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from replay_lib.errors import SettingsError
from replay_lib.loss import EntropySettings, GrpoSettings

#: AXRL's GrpoTrainerConfig, EntropyControlConfig and OPDConfig.
DEFAULTS = {
    "loss_type": "grpo2",
    "clip_ratio_high": 0.28,
    "clip_ratio_low": 0.2,
    "dual_clip_neg_adv_factor": 3.0,
    "dual_soft_clip": 3.0,
    "loss_agg_type": "token-mean",
    "micro_batch_denominator_type": "token",
    "entropy_control": {
        "target_entropy": 0.1,
        "alpha": 0.0,
        "compute_entropy": False,
        "top_k": -1,
        "top_quantile": 1.0,
        "easy_score_cutoff": 0.4,
        "epsilon": 1e-6,
    },
    "kl_control_alpha": 0.0,
    "is_base_logprobs": "old_logprobs",
    "kl_base_logprobs": "old_logprobs",
    "mismatch_token_clip_max": None,
    "mismatch_seq_masking_low": None,
    "mismatch_seq_masking_high": None,
    "mismatch_token_veto_threshold": None,
    "icepop_masking_low": None,
    "icepop_masking_high": None,
    "turn_reward_alpha": 0.0,
    "seq_turn_alpha": None,
    "opd": {
        "enabled": False,
        "opd_alpha": 0.1,
        "reverse_kl_clip": 10.0,
        "student_logprob_source": "cur_logprobs",
        "normalize_student_logprob_scale": False,
        "backend": "sglang",
        "teacher_model": None,
        "sglang_worker": None,
        "sglang_host": None,
        "sglang_port": None,
        "teacher_weight_name": "opd_teacher_weights",
    },
    "log_sample": True,
    "normalize_advantage_by_batch_std": False,
    "normalize_advantages_over_valid_tokens_in_batch": False,
    "ppo_value": None,
}


def test_defaults_are_the_trainers():
    settings = GrpoSettings()
    assert (settings.loss_type, settings.clip_ratio_high, settings.clip_ratio_low) == (
        "grpo2",
        0.28,
        0.2,
    )
    assert settings.model_dump() == DEFAULTS
    settings.check()


def test_replace_sets_fields_and_leaves_the_original():
    before = GrpoSettings()
    after = before.replace(mismatch_token_clip_max=2, loss_agg_type="seq-mean-token-mean")
    assert (after.mismatch_token_clip_max, after.loss_agg_type) == (2.0, "seq-mean-token-mean")
    assert before == GrpoSettings()


def test_replace_of_a_group_keeps_its_other_fields():
    settings = GrpoSettings(entropy_control=EntropySettings(target_entropy=0.7))
    after = settings.replace(entropy_control={"alpha": 0.01})
    assert (after.entropy_control.target_entropy, after.entropy_control.alpha) == (0.7, 0.01)


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError) as error:
        GrpoSettings().replace(entropy_control={"strength": 1.0})
    assert str(error.value) == (
        "loss settings: entropy_control: strength: found an unknown field, expected one of alpha, "
        "compute_entropy, easy_score_cutoff, epsilon, target_entropy, top_k, top_quantile"
    )


def test_a_field_that_the_loss_does_not_read_cannot_be_replaced():
    with pytest.raises(SettingsError) as error:
        GrpoSettings().replace(entropy_control={"epsilon": 1e-3})
    assert str(error.value) == (
        "loss settings: entropy_control: epsilon: found a field that acts before a batch is saved "
        "or not on the loss, expected one of alpha, compute_entropy, target_entropy, top_k, "
        "top_quantile. Patch the batch to change what it acts on."
    )
    # a saved trainer holds it all the same
    assert GrpoSettings(entropy_control={"epsilon": 1e-3}).entropy_control.epsilon == 1e-3


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"loss_type": "dapo"},
            "loss settings: loss_type: found 'dapo', expected another value (Input should be "
            "'grpo', 'ppo', 'tis', 'gspo', 'grpo2', 'topr' or 'kimi2_5')",
        ),
        (
            {"clip_ratio_high": "0.2"},
            "loss settings: clip_ratio_high: found '0.2', expected another value (Input should be "
            "a valid number)",
        ),
        (
            {"log_sample": "yes"},
            "loss settings: log_sample: found 'yes', expected another value (Input should be a "
            "valid boolean)",
        ),
        (
            {"icepop_masking_low": float("nan")},
            "loss settings: icepop_masking_low: found nan, expected another value (NaN is no "
            "setting)",
        ),
    ],
)
def test_a_wrong_value_is_refused(fields, text):
    with pytest.raises(SettingsError) as error:
        GrpoSettings(**fields)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"loss_type": "gspo"},
            "loss_agg_type: found token-mean, expected seq-mean-token-mean for loss_type gspo",
        ),
        (
            {"loss_type": "ppo", "is_base_logprobs": "rollout_logprobs"},
            "is_base_logprobs: found rollout_logprobs, expected old_logprobs for loss_type ppo",
        ),
        (
            {"loss_type": "kimi2_5"},
            "is_base_logprobs: found old_logprobs, expected rollout_logprobs for loss_type kimi2_5",
        ),
        (
            {
                "loss_type": "kimi2_5",
                "is_base_logprobs": "rollout_logprobs",
                "mismatch_token_clip_max": 2,
            },
            "mismatch_token_clip_max: found 2, expected none for loss_type kimi2_5",
        ),
        (
            {"loss_type": "grpo", "dual_clip_neg_adv_factor": 1.0},
            "dual_clip_neg_adv_factor: found 1, expected more than 1, or none, for loss_type grpo",
        ),
        (
            {"dual_soft_clip": None},
            "dual_soft_clip: found none, expected a ratio for loss_type grpo2",
        ),
        (
            {"entropy_control": {"top_quantile": 0.0}},
            "entropy_control.top_quantile: found 0, expected more than 0",
        ),
        (
            {"entropy_control": {"top_quantile": -0.5}},
            "entropy_control.top_quantile: found -0.5, expected more than 0",
        ),
        (
            {"loss_type": "grpo", "dual_clip_neg_adv_factor": 0.5},
            "dual_clip_neg_adv_factor: found 0.5, expected more than 1, or none, for loss_type "
            "grpo",
        ),
        (
            {"opd": {"enabled": True, "opd_alpha": 1.5}},
            "opd.opd_alpha: found 1.5, expected 0 to 1",
        ),
    ],
)
def test_contradictions_are_found_when_the_settings_are_used(fields, text):
    settings = GrpoSettings(**fields)  # as in the trainer: two patches may pass through it
    with pytest.raises(SettingsError) as error:
        settings.check()
    assert str(error.value) == f"loss settings: {text}"


def test_a_contradiction_of_another_loss_type_does_not_count():
    GrpoSettings(loss_type="tis", dual_clip_neg_adv_factor=0.5, dual_soft_clip=None).check()
    GrpoSettings(loss_type="grpo", dual_clip_neg_adv_factor=None).check()


def test_settings_are_frozen_and_survive_a_pickle():
    settings = GrpoSettings(loss_type="topr")
    with pytest.raises(ValidationError, match="frozen"):
        settings.loss_type = "tis"
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert GrpoSettings(**settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"alpha": -1.0}, False),
        ({"alpha": 1e-6}, True),
        ({"compute_entropy": True}, True),
        ({"alpha": 0.1, "compute_entropy": True}, True),
    ],
)
def test_entropies_are_wanted_by_a_positive_weight_or_on_request(fields, wanted):
    assert GrpoSettings(entropy_control=fields).wants_entropy is wanted


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_borders_of_ranges_are_allowed(share):
    GrpoSettings(opd={"enabled": True, "opd_alpha": share}).check()
    GrpoSettings(entropy_control={"top_quantile": 1e-3}).check()
    GrpoSettings(loss_type="grpo", dual_clip_neg_adv_factor=1.001).check()


@pytest.mark.parametrize("share", [-0.001, 1.001])
def test_a_teachers_share_counts_only_where_there_is_a_teacher(share):
    GrpoSettings(opd={"opd_alpha": share}).check()
    with pytest.raises(SettingsError, match="expected 0 to 1"):
        GrpoSettings(opd={"enabled": True, "opd_alpha": share}).check()


def test_the_first_contradiction_is_told_and_a_range_comes_after_a_type():
    settings = GrpoSettings(dual_soft_clip=None, entropy_control={"top_quantile": -1.0})
    with pytest.raises(SettingsError, match="dual_soft_clip"):
        settings.check()


def test_a_group_may_be_replaced_whole_or_in_part():
    whole = GrpoSettings().replace(entropy_control=EntropySettings(alpha=0.5))
    assert whole.entropy_control == EntropySettings(alpha=0.5)
    with pytest.raises(SettingsError, match="loss_type"):
        GrpoSettings().replace(loss_type={"alpha": 0.5})


def test_of_several_faults_the_first_is_told():
    with pytest.raises(SettingsError, match="clip_ratio_high: found 'x'"):
        GrpoSettings(clip_ratio_low="y", clip_ratio_high="x", kl_control_alpha="z")
