"""Replay the step with one ratio a sequence."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-gspo-loss",
    family="settings",
    summary="GSPO: one importance ratio a row, rows weighted equally.",
    source="https://arxiv.org/abs/2507.18071; AXRL loss_type",
    changes_unit=True,
)
def use_gspo_loss() -> Patch:
    """Replay the step with one ratio a sequence.

    loss_type = gspo: PPO's surrogate with ratio[b] = exp(mean over loss tokens of (current -
    base)).

    The loss wants loss_agg_type seq-mean-token-mean, which is set with it and changes the
    loss's unit.
    """
    return settings_patch(loss_type="gspo", loss_agg_type="seq-mean-token-mean")
