"""Weight micro-batches by rows and turns instead of tokens."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="use-sequence-turn-denominator",
    family="denominator",
    summary="Gradients of micro-batches are averaged by rows, with a share for further turns.",
    source="AXRL micro_batch_denominator_type, seq_turn_alpha",
    changes_unit=True,
)
def use_sequence_turn_denominator(alpha: float = 1.0) -> Patch:
    """Weight micro-batches by rows and turns instead of tokens.

    micro_batch_denominator_type = seq_turn with seq_turn_alpha = ``alpha`` (0: a row counts
    once, 1: and once more for each of its turns).

    Then the gradient depends on how the trainer split the batch, and the unit of the loss changes.
    """
    if not 0 <= alpha <= 1:
        raise PatchError(
            f"mitigation use-sequence-turn-denominator: found alpha={alpha!r}, expected 0 to 1"
        )
    return settings_patch(micro_batch_denominator_type="seq_turn", seq_turn_alpha=float(alpha))
