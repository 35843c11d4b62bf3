"""Average tokens inside rows first, then rows."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-sequence-mean-aggregation",
    family="denominator",
    summary="Each row counts the same, however long it is.",
    source="AXRL loss_agg_type",
    changes_unit=True,
)
def use_sequence_mean_aggregation() -> Patch:
    """loss_agg_type = seq-mean-token-mean: mean over rows of the mean over each row's loss tokens.

    Long rows lose weight against short ones; the unit of the loss changes.
    """
    return settings_patch(loss_agg_type="seq-mean-token-mean")
