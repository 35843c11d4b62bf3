"""Rotary angles of packed rows, gathered by position in one step.

Megatron places the angles of packed rows itself, row by row and layer by layer (0.19 even applies
them row by row): hundreds of small operations for a micro-batch. Here the angles of all N packed
tokens are gathered once a forward, and Megatron is told of one sequence of N tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from replay_lib.engine.attention import Rows


class PackedRotary(nn.Module):
    """Stands in the place of a GPTModel's ``rotary_pos_emb``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.rows: Rows | None = None

    def get_rotary_seq_len(self, *_megatron: Any) -> int:
        """Angles are needed up to the longest row, whatever Megatron thinks of the packing."""
        assert self.rows is not None, "forward() sets the rows"
        return self.rows.longest

    def forward(self, length: int, **options: Any) -> Tensor:
        """Angles ``[N, 1, 1, D]`` of the packed tokens, each row from position 0."""
        assert self.rows is not None
        angles: Tensor = self.inner(length, **options)
        return angles.index_select(0, self.rows.positions)
