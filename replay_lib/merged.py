"""Rows that are prefix trees: several paths (turns) of one trajectory, shared prefixes once.

A merged row holds the tokens of its tree node after node, ancestors before descendants, and pads
the last node to a multiple of 128. A path runs from a root to its leaf and may end inside it. The
trainer's attention is given by ranges: a range of queries sees a range of keys, wholly (an
ancestor) or causally (its own node).

Source: AXRL ``utils/megatron/prefix_tree.py`` (PrefixMergeInfo, merge_trajectory_samples) and
``utils/megatron/magi_forward.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MergedRow:
    """A row with several paths (a prefix tree): kept as read, not composed.

    ``path_routes[p]`` is int16 ``[rows, L, K]``, the routes of path p before merging. ``tree``
    is AXRL's PrefixMergeInfo as plain data (lists, ints, int tensors), or None where the row
    has several paths but no tree. ``tree_check.checked_tree`` makes a PrefixTree of it.
    """

    path_routes: tuple[Tensor, ...]
    tree: dict[str, Any] | None


@dataclass(frozen=True)
class Node:
    """Tokens ``start`` to ``end`` (exclusive) of the row; ``parent`` is a node's number or -1."""

    start: int
    end: int
    parent: int


class Range(NamedTuple):
    """Queries ``[query_start, query_end)`` see keys ``[key_start, key_end)``.

    ``causal``: both ranges are the same, and a token sees itself and what is before it.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    causal: bool


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """A checked tree. Every position is a place in the row, padding behind the last node included.

    ``leaves[p]`` is the node in which path p ends, ``lengths[p]`` its tokens. ``total`` counts the
    row's tokens with padding, ``real`` without. ``sources[i]`` says of which path, and which of its
    tokens, token ``i + 1`` is (int64 ``[real - 1, 2]``, or None where the row was merged without
    routes). Its route row, the one before, is that of token i wherever token i is followed by it.
    """

    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]
    lengths: tuple[int, ...]
    ranges: tuple[Range, ...]
    total: int
    real: int
    sources: Tensor | None

    def chain(self, node: int) -> list[int]:
        """Numbers of the nodes from a root to ``node``, both included."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def path(self, number: int) -> Tensor:
        """Places of path ``number``'s tokens, int64 ``[lengths[number]]``."""
        import torch

        parts = [self.nodes[n] for n in self.chain(self.leaves[number])]
        whole = torch.cat([torch.arange(n.start, n.end) for n in parts])
        return whole[: self.lengths[number]]

    def positions(self) -> Tensor:
        """How many tokens of its path come before each token, int64 ``[total]``."""
        import torch

        parts = []
        before: list[int] = []  # tokens on the way to each node
        for node in self.nodes:
            parent = self.nodes[node.parent] if node.parent >= 0 else None
            base = before[node.parent] + parent.end - parent.start if parent else 0
            before.append(base)
            parts.append(torch.arange(base, base + node.end - node.start))
        return torch.cat(parts)


def tree_ranges(nodes: Sequence[Node]) -> list[Range]:
    """The attention of a tree: every node sees its ancestors wholly and itself causally."""
    found: list[Range] = []
    for node in nodes:
        found.append(Range(node.start, node.end, node.start, node.end, True))
        parent = node.parent
        while parent >= 0:
            above = nodes[parent]
            found.append(Range(node.start, node.end, above.start, above.end, False))
            parent = above.parent
    return found


def merged_routes(tree: PrefixTree, path_routes: Sequence[Tensor]) -> Tensor:
    """Routes of a merged row, ``[real - 1, L, K]``: row i comes from the path of token ``i + 1``.

    That is the trainer's own composition. A leaf's last token gets what belongs elsewhere: the
    route of the token before the next branch, or the next path's last one where a new root begins
    (numpy's row -1). Such a token predicts nothing and nobody attends to it.
    """
    import torch

    assert tree.sources is not None, "checked_tree() asks for sources where there are routes"
    counts = [len(routes) for routes in path_routes]
    ends = torch.tensor(list(accumulate(counts)))
    path, read = tree.sources.unbind(dim=1)
    first = ends[path] - torch.tensor(counts)[path]
    row = torch.where(read > 0, first + read, ends[path]) - 1
    return torch.cat(list(path_routes))[row.clamp(min=0)]


def training_paths(tree: PrefixTree, input_ids_T: Tensor, labels_T: Tensor) -> Tensor:
    """The one path in which each real token is trained, int64 ``[real]``.

    That is the token's source where the trainer wrote one: a trainable path wins there. Else it is
    the first path in which the token is followed by its label, or the first that has the token.
    """
    import torch

    chosen = torch.full((tree.real,), -1)
    for number in range(len(tree.lengths)):
        place = tree.path(number)
        chosen[place[chosen[place] < 0]] = number
    wanted = torch.full((tree.real,), -1)
    for number in range(len(tree.lengths)):
        place = tree.path(number)
        fits = input_ids_T[place[1:]] == labels_T[place[:-1]]
        place = place[:-1][fits]
        wanted[place[wanted[place] < 0]] = number
    if tree.sources is not None:
        wanted[1:] = tree.sources[:, 0]
    return torch.where(wanted >= 0, wanted, chosen)


def differing_routes(tree: PrefixTree, path_routes: Sequence[Tensor]) -> int:
    """How many (path, token) pairs have routes that differ from the merged row's.

    A path's last token has no route, and neither has a leaf's last token in the merged row.
    """
    merged = merged_routes(tree, path_routes)
    count = 0
    for number, routes in enumerate(path_routes):
        place = tree.path(number)[:-1]
        off = (merged[place] != routes[: len(place)]).flatten(1).any(dim=1)
        count += int(off.sum())
    return count
