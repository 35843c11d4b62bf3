"""Prefix trees of merged rows, by the checks that the engine makes before it packs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from replay_lib.analysis.findings import Finding, Place, finding
from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError
from replay_lib.merged import MergedRow, PrefixTree
from replay_lib.tree_check import checked_tree


def check_trees(batch: RankBatch, file: Path, *, replayed: bool) -> Iterator[Finding]:
    """A finding for each merged row whose tree or routes are refused; ``replayed``: they are."""
    for row, (merged, length) in enumerate(
        zip(batch.merge_info or (), batch.lengths(), strict=False)
    ):
        if merged is None:
            continue
        at = Place(dp_rank=batch.dp_rank, row=row)
        try:
            tree = checked_tree(
                merged,
                length=length,
                width=batch.width,
                where=file.name,
                routes=replayed and bool(merged.path_routes),
            )
        except BatchError as error:
            yield finding("tree-inconsistent", file, str(error), at)
            continue
        if merged.path_routes:
            yield from _route_counts(tree, merged, file, at)


def _route_counts(tree: PrefixTree, merged: MergedRow, file: Path, at: Place) -> Iterator[Finding]:
    """Each path has its own routes: one fewer than its tokens, or as many."""
    routes, lengths = merged.path_routes, tree.lengths
    if len(routes) != len(lengths):
        found = f"routes of {len(routes)} paths for {len(lengths)}"
        yield finding("route-count", file, found, at)
        return
    for path, (route, length) in enumerate(zip(routes, lengths, strict=True)):
        if len(route) not in (length - 1, length):
            found = f"path {path}: {len(route)} routes for {length} tokens, not {length - 1}"
            yield finding("route-count", file, found, at)
