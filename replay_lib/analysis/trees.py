"""Prefix trees of merged rows, by the checks that the engine makes before it packs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from replay_lib.analysis.findings import Finding, Place, finding
from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError
from replay_lib.tree_check import checked_tree


def check_trees(batch: RankBatch, file: Path, *, replayed: bool) -> Iterator[Finding]:
    """A finding for each merged row whose tree is refused; ``replayed``: routes are, too."""
    for row, (merged, length) in enumerate(
        zip(batch.merge_info or (), batch.lengths(), strict=False)
    ):
        if merged is None:
            continue
        try:
            checked_tree(
                merged,
                length=length,
                width=batch.width,
                where=file.name,
                routes=replayed and bool(merged.path_routes),
            )
        except BatchError as error:
            at = Place(dp_rank=batch.dp_rank, row=row)
            yield finding("tree-inconsistent", file, str(error), at)
