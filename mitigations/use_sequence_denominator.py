"""Weight micro-batches by their rows instead of their tokens."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-sequence-denominator",
    family="denominator",
    summary="Gradients of micro-batches are averaged by their numbers of rows.",
    source="AXRL micro_batch_denominator_type",
    changes_unit=True,
)
def use_sequence_denominator() -> Patch:
    """Weight micro-batches by their rows instead of their tokens.

    micro_batch_denominator_type = sequence: a micro-batch's mean loss counts as often as it has
    rows.

    Then the gradient depends on how the trainer split the batch, and the unit of the loss changes.
    """
    return settings_patch(micro_batch_denominator_type="sequence")
