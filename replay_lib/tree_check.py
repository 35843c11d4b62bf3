"""Prefix trees as they stand in a batch, checked into :class:`~replay_lib.merged.PrefixTree`.

Nothing of a tree is believed: nodes have to follow each other, paths have to end in their leaves
and visit every token, the ranges of the attention have to be those of the nodes, and every source
of a route has to name the token that it stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay_lib.errors import BatchError, fault
from replay_lib.merged import MergedRow, Node, PrefixTree, Range, tree_ranges

if TYPE_CHECKING:
    from torch import Tensor

#: The kinds of AXRL's ``attn_type_map``.
FULL, CAUSAL = 0, 1


def checked_tree(
    row: MergedRow, *, length: int, width: int, where: str, routes: bool
) -> PrefixTree:
    """The tree of a row of ``length`` real tokens and padded width ``width``.

    ``routes`` asks for sources of routes. Raises BatchError, naming ``where`` and the field of the
    tree, at the first thing that contradicts another one.
    """
    if row.tree is None:
        raise BatchError(
            fault(
                where,
                "merge_info",
                f"{len(row.path_routes)} paths and no tree",
                "a tree that says which token belongs to which path",
            )
        )
    read = _Reader(row.tree, where)
    total, real = read.number("total_padded"), read.number("real_total")
    if not (0 < real == length and real <= total <= width):
        found = f"{real} of {total} (total_padded)"
        read.refuse("real_total", found, f"{length} as in attention_mask, and no more than {width}")
    nodes = _nodes(read, total)
    tree = PrefixTree(
        nodes=nodes,
        leaves=_leaves(read, nodes),
        lengths=_lengths(read),
        ranges=_ranges(read, nodes),
        total=total,
        real=real,
        sources=None,
    )
    _check_paths(read, tree)
    sources = _sources(read, tree, needed=routes)
    return PrefixTree(**{**vars(tree), "sources": sources})


class _Reader:
    """Fields of one tree by name; what is not as it should be is told with row and field."""

    def __init__(self, tree: dict[str, Any], where: str) -> None:
        self.tree = tree
        self.where = where

    def refuse(self, field: str, found: str, expected: str) -> None:
        raise BatchError(
            fault(
                self.where,
                f"merge_info.{field}",
                found,
                expected,
                "An inconsistent tree cannot be replayed.",
            )
        )

    def number(self, field: str) -> int:
        value = self.tree.get(field)
        if not _is_int(value):
            self.refuse(field, _describe(value), "a whole number")
        return int(value)  # type: ignore[arg-type]

    def rows(self, field: str, columns: int) -> list[tuple[int, ...]]:
        """A list of tuples of ``columns`` ints; with 1 column a list of plain ints."""
        value = self.tree.get(field)
        rows = value if isinstance(value, list | tuple) else None
        if rows is None:
            self.refuse(field, _describe(value), "a list")
            return []
        wanted = "a whole number" if columns == 1 else f"{columns} whole numbers"
        for place, item in enumerate(rows):
            parts = (item,) if columns == 1 else item
            fits = isinstance(parts, list | tuple) and len(parts) == columns
            if not (fits and all(_is_int(x) for x in parts)):
                self.refuse(f"{field}[{place}]", _describe(item), wanted)
        return [(item,) if columns == 1 else tuple(item) for item in rows]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _describe(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, int | tuple | list) else type(value).__name__


def _nodes(read: _Reader, total: int) -> tuple[Node, ...]:
    raw = read.tree.get("nodes")
    if not isinstance(raw, list) or not raw:
        read.refuse("nodes", _describe(raw), "a list of nodes")
        return ()
    nodes: list[Node] = []
    for number, item in enumerate(raw):
        values = [item.get(k) if isinstance(item, dict) else None for k in ("start", "end")]
        parent = item.get("parent") if isinstance(item, dict) else None
        behind = nodes[-1].end if nodes else 0
        if not all(_is_int(v) for v in (*values, parent)):
            read.refuse(f"nodes[{number}]", _describe(item), "start, end and parent")
        node = Node(values[0], values[1], parent)  # type: ignore[arg-type]
        if node.start != behind or node.end <= node.start:
            found = f"tokens {node.start} to {node.end}"
            read.refuse(f"nodes[{number}]", found, f"tokens from {behind} on, behind the last node")
        if not -1 <= node.parent < number:
            found = f"parent {node.parent}"
            read.refuse(f"nodes[{number}]", found, f"-1 or a node before it (0 to {number - 1})")
        nodes.append(node)
    if nodes[-1].end != total:
        read.refuse("nodes", f"an end at {nodes[-1].end}", f"{total} (total_padded)")
    return tuple(nodes)


def _leaves(read: _Reader, nodes: tuple[Node, ...]) -> tuple[int, ...]:
    leaves: list[int] = []
    for path, (leaf, prefix) in enumerate(read.rows("path_to_leaf", 2)):
        if not 0 <= leaf < len(nodes):
            read.refuse(f"path_to_leaf[{path}]", f"node {leaf}", f"0 to {len(nodes) - 1}")
        before, node = 0, nodes[leaf].parent
        while node >= 0:
            before += nodes[node].end - nodes[node].start
            node = nodes[node].parent
        if prefix != before:
            found, expected = f"{prefix} tokens before node {leaf}", f"{before} as in nodes"
            read.refuse(f"path_to_leaf[{path}]", found, expected)
        leaves.append(leaf)
    if not leaves:
        read.refuse("path_to_leaf", "no path", "one or more")
    return tuple(leaves)


def _lengths(read: _Reader) -> tuple[int, ...]:
    return tuple(n for (n,) in read.rows("turn_sample_lens", 1))


def _ranges(read: _Reader, nodes: tuple[Node, ...]) -> tuple[Range, ...]:
    """The ranges as stored: the same as those of the nodes, in any order."""
    queries, keys = read.rows("q_ranges", 2), read.rows("k_ranges", 2)
    kinds = [kind for (kind,) in read.rows("attn_type_map", 1)]
    if not len(queries) == len(keys) == len(kinds):
        found = f"{len(queries)} ranges of queries, {len(keys)} of keys, {len(kinds)} kinds"
        read.refuse("q_ranges", found, "as many of each")
    odd = [kind for kind in kinds if kind not in (FULL, CAUSAL)]
    if odd:
        read.refuse("attn_type_map", f"kind {odd[0]}", f"{FULL} (full) or {CAUSAL} (causal)")
    depths = _depths(nodes)  # counted before they are made: a long chain has too many to make
    if len(queries) != sum(depths):
        read.refuse("q_ranges", f"{len(queries)} ranges", f"{sum(depths)}, those of the nodes")
    stored = [
        Range(q[0], q[1], k[0], k[1], kind == CAUSAL)
        for q, k, kind in zip(queries, keys, kinds, strict=True)
    ]
    wanted = tree_ranges(nodes)
    short = sorted(set(wanted) - set(stored))
    if short:
        extra = sorted(set(stored) - set(wanted))
        found = f"{extra[0]}" if extra else "one range twice"
        read.refuse("q_ranges", found, f"{short[0]}, as in nodes")
    return tuple(sorted(stored))


def _depths(nodes: tuple[Node, ...]) -> list[int]:
    """How many nodes lie on the way to each, itself included."""
    depths: list[int] = []
    for node in nodes:
        depths.append(depths[node.parent] + 1 if node.parent >= 0 else 1)
    return depths


def _check_paths(read: _Reader, tree: PrefixTree) -> None:
    import torch

    if len(tree.lengths) != len(tree.leaves):
        found = f"{len(tree.lengths)} lengths"
        read.refuse("turn_sample_lens", found, f"one for each of {len(tree.leaves)} paths")
    visited = torch.zeros(tree.total, dtype=torch.bool)
    for path, (leaf, length) in enumerate(zip(tree.leaves, tree.lengths, strict=True)):
        whole = sum(tree.nodes[n].end - tree.nodes[n].start for n in tree.chain(leaf))
        before = whole - (tree.nodes[leaf].end - tree.nodes[leaf].start)
        if not before < length <= whole:
            found, expected = f"{length} tokens", f"{before + 1} to {whole}, an end in node {leaf}"
            read.refuse(f"turn_sample_lens[{path}]", found, expected)
        visited[tree.path(path)] = True
    unvisited = (visited != (torch.arange(tree.total) < tree.real)).nonzero()
    if len(unvisited):
        place = int(unvisited[0])
        found = f"token {place} on {'a' if bool(visited[place]) else 'no'} path"
        read.refuse("turn_sample_lens", found, f"paths over tokens 0 to {tree.real - 1} exactly")


def _sources(read: _Reader, tree: PrefixTree, *, needed: bool) -> Tensor | None:
    import torch

    found = [_source(read, f"routing_source_{name}", tree) for name in ("path", "read_pos")]
    if found[0] is None or found[1] is None:
        if needed and tree.real > 1:
            read.refuse("routing_source_path", "none", "the path of each token's route")
        # a row of one token has no route, and the trainer writes no sources for it
        return torch.empty(0, 2, dtype=torch.int64) if needed else None
    sources = torch.stack([found[0], found[1]], dim=1)
    paths = [tree.path(number) for number in range(len(tree.lengths))]
    for place, (path, token) in enumerate(sources.tolist()):
        if not 0 <= path < len(paths):
            expected = f"0 to {len(paths) - 1}"
            read.refuse(f"routing_source_path[{place}]", f"path {path}", expected)
        if not 0 <= token < len(paths[path]) or int(paths[path][token]) != place + 1:
            read.refuse(
                f"routing_source_read_pos[{place}]",
                f"token {token} of path {path}",
                f"the one that is token {place + 1} of the row",
            )
    return sources


def _source(read: _Reader, field: str, tree: PrefixTree) -> Tensor | None:
    import torch

    value = read.tree.get(field)
    if value is None:
        return None
    whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    if not whole or tuple(value.shape) != (tree.real - 1,):
        found = f"{value.dtype} {list(value.shape)}" if whole else _describe(value)
        read.refuse(field, found, f"whole numbers [{tree.real - 1}], one less than real_total")
    numbers: Tensor = value.to(torch.int64)
    return numbers
