"""Denominators: what a micro-batch counts, whatever the aggregation and the filters."""

from __future__ import annotations

import pytest
import torch

from replay_lib.loss import GrpoSettings
from replay_lib.loss.denominator import count_turns, micro_batch_denominator

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 1]], dtype=torch.bool)
TURNS = torch.tensor([[0, 0, 5, 2], [0, 1, 2, 3], [0, -1, -1, 1]])


def denominator(turns=TURNS, **fields) -> int:
    settings = GrpoSettings(**fields)
    result = micro_batch_denominator(settings, MASK, turns)
    assert result.dtype == torch.int32
    return int(result)


def test_tokens_and_sequences():
    assert denominator(micro_batch_denominator_type="token") == 5
    assert denominator(micro_batch_denominator_type="sequence") == 2


def test_turns_are_distinct_ids_on_loss_tokens_of_each_row():
    assert int(count_turns(TURNS, MASK)) == 4  # {0, 2} and {0, 1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seq_turn_alpha": 1.0}, 6),
        ({"seq_turn_alpha": 0.24}, 2),  # 2 + .96, truncated
        ({"turn_reward_alpha": 0.5}, 4),  # stands in where seq_turn_alpha is None
        ({"turn_reward_alpha": 0.5, "seq_turn_alpha": 0.0}, 2),
    ],
)
def test_sequences_and_turns(fields, expected):
    assert denominator(micro_batch_denominator_type="seq_turn", **fields) == expected


def test_without_turns_only_sequences_count():
    fields = {"micro_batch_denominator_type": "seq_turn", "seq_turn_alpha": 1.0}
    assert denominator(turns=None, **fields) == 2
