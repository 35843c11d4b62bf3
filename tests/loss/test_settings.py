"""Settings: AXRL's names and defaults, strict, with errors that say what to do."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from replay_lib.errors import SettingsError
from replay_lib.loss import EntropySettings, GrpoSettings


def test_defaults_are_the_trainers():
    settings = GrpoSettings()
    assert (settings.loss_type, settings.clip_ratio_high, settings.clip_ratio_low) == (
        "grpo2",
        0.28,
        0.2,
    )
    assert settings.loss_agg_type == "token-mean"
    assert settings.mismatch_token_clip_max is None
    assert settings.opd.opd_alpha == 0.1
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
