"""Attention over trees against each path by itself, in formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from tree_shapes import SHAPES, TWICE, Shape, merged_row

from replay_lib.engine.tree_attention import Piece, pieces_of, tree_attention
from replay_lib.merged import PrefixTree
from replay_lib.tree_check import checked_tree

#: float64: two orders of the same sums.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
HEADS, GROUPS, D, SCALE = 4, 2, 3, 0.4


def tree_of(shape: Shape) -> PrefixTree:
    row = merged_row(shape, torch.zeros(shape.total, 1, 2, dtype=torch.int16))
    return checked_tree(row, length=shape.real, width=shape.total, where="row", routes=True)


def inputs(total: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    return [
        torch.randn(total, n, D, generator=draw, dtype=torch.float64).requires_grad_()
        for n in heads
    ]


def path_attention(query: Tensor, key: Tensor, value: Tensor, path: list[int]) -> Tensor:
    """Plain causal attention of one path, ``[tokens, HEADS, D]``."""
    q = query[path]
    k, v = (x[path].repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qad,kad->aqk", q, k) * SCALE
    past = torch.ones(len(path), len(path), dtype=torch.bool).tril()
    return torch.einsum("aqk,kad->qad", scores.masked_fill(~past, -torch.inf).softmax(-1), v)


def expected(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each real token's output from the first of its paths."""
    rows: dict[int, Tensor] = {}
    for path in shape.paths():
        out = path_attention(query, key, value, path)
        for place, token in zip(path, out, strict=True):
            rows.setdefault(place, token)
    return torch.stack([rows[place] for place in range(shape.real)])


def check(shape: Shape, *, offset: int = 0, largest: int = 1 << 24) -> None:
    """Outputs and gradients of the real tokens, the row standing at ``offset``."""
    ours, theirs = inputs(shape.total), inputs(shape.total)
    pieces = pieces_of(tree_of(shape).ranges, offset, largest)
    if offset:
        pieces = [Piece(0, offset), *pieces]
    shifted = [torch.cat([x.new_ones(offset, *x.shape[1:]), x]) for x in ours]
    out = tree_attention(shifted[0], shifted[1], shifted[2], pieces, SCALE)[offset:]
    wanted = expected(shape, *theirs)
    torch.testing.assert_close(out[: shape.real], wanted, **CLOSE)
    weight = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    (out[: shape.real] * weight).sum().backward()
    (wanted * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        # the gradients of shared keys are added up in float32
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("offset", [0, 5])
def test_a_token_attends_to_its_own_path(name, offset):
    check(SHAPES[name], offset=offset)


@pytest.mark.parametrize("largest", [1, 20, 60])
def test_pieces_that_are_cut_give_the_same(largest):
    whole = pieces_of(tree_of(TWICE).ranges, 0)
    cut = pieces_of(tree_of(TWICE).ranges, 0, largest)
    assert len(cut) > len(whole) == 5
    assert all(
        (p.end - p.start) * p.reach <= largest or p.end - p.start == 1 or not p.before for p in cut
    )
    check(TWICE, largest=largest)


def test_a_look_at_another_branch_would_be_seen():
    """A control: the comparison above is not blind."""
    ours = inputs(TWICE.total)
    pieces = pieces_of(tree_of(TWICE).ranges, 0)
    wrong = [Piece(p.start, p.end, ((0, 4), (4, 7)) if p.start == 7 else p.before) for p in pieces]
    out = tree_attention(ours[0], ours[1], ours[2], wrong, SCALE)
    off = (out[: TWICE.real] - expected(TWICE, *ours)).abs().amax(dim=(1, 2))
    assert (off[7:11] > 1e-3).all() and (off[:7] < 1e-9).all()


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Trees of up to eight nodes in depth-first order, every leaf and some inner ends a path."""
    count = draw(st.integers(1, 8))
    nodes: list[tuple[int, int]] = []
    open_chain: list[int] = []  # whoever may still get a child, deepest last
    for number in range(count):
        depth = draw(st.integers(0, len(open_chain)))
        open_chain = open_chain[:depth]
        nodes.append((draw(st.integers(1, 5)), open_chain[-1] if open_chain else -1))
        open_chain.append(number)
    bare = Shape(nodes=nodes, ends=[], trained={}, total=sum(n for n, _ in nodes))
    parents = {parent for _, parent in nodes}
    ends: list[tuple[int, int]] = []
    for number, (size, _) in enumerate(nodes):
        whole = sum(nodes[n][0] for n in bare.chain(number))
        if number not in parents:
            ends.append((number, whole))
        if draw(st.booleans()):  # a path that another one goes on from
            ends.append((number, whole - draw(st.integers(0, size - 1))))
    total = bare.real + draw(st.integers(0, 6))
    return Shape(nodes=nodes, ends=ends, trained={}, total=total)


@given(shapes(), st.sampled_from([3, 30, 1 << 24]))
def test_any_tree(shape, largest):
    check(shape, largest=largest)
