"""What a micro-batch counts in the division of the summed gradients.

The denominator has nothing to do with the aggregation: a token mean may be multiplied by a number
of sequences. Filters never change it: it counts the loss mask as it was recorded.

Source: AXRL ``GrpoTrainer.compute_micro_batch_denominator`` and ``get_num_turns``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replay_lib.loss.settings import GrpoSettings


def micro_batch_denominator(
    settings: GrpoSettings, loss_mask_BT: Tensor, turn_index_BT: Tensor | None
) -> Tensor:
    """Tokens, sequences, or sequences and turns of a micro-batch; 0-d int32.

    ``seq_turn`` is ``trunc(sequences + alpha * turns)`` in float32, where alpha is
    ``seq_turn_alpha`` or, where that is None, ``turn_reward_alpha``; so .37 of two turns beside
    one sequence count nothing. Sequences are rows with at least one loss token.
    """
    if settings.micro_batch_denominator_type == "token":
        return loss_mask_BT.sum(dtype=torch.int32)
    sequences = loss_mask_BT.any(dim=-1).sum(dtype=torch.int32)
    if settings.micro_batch_denominator_type == "sequence":
        return sequences
    alpha = settings.seq_turn_alpha
    alpha = settings.turn_reward_alpha if alpha is None else alpha
    turns = 0 if turn_index_BT is None else int(count_turns(turn_index_BT, loss_mask_BT))
    # alpha * turns in double precision, the addition in float32: the trainer's own rounding
    return (sequences.to(torch.float32) + alpha * turns).to(torch.int32)


def count_turns(turn_index_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Distinct turn ids >= 0 on loss tokens, counted in each row and summed; 0-d int64."""
    none = torch.full_like(turn_index_BT, -1)
    ids_BT = torch.where(loss_mask_BT, turn_index_BT, none).sort(dim=-1).values
    previous_BT = torch.cat([none[:, :1], ids_BT[:, :-1]], dim=-1)
    return ((ids_BT >= 0) & (ids_BT != previous_BT)).sum()
