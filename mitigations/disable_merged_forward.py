"""Replay each path of a merged row as a row of its own."""

from __future__ import annotations

from replay_lib.patch import Patch, mitigation, rows_patch


@mitigation(
    slug="disable-merged-forward",
    family="rows",
    summary="Prefix trees taken apart: every path a row of its own, with its own routes.",
    source="AXRL use_magi_merged_forward",
)
def disable_merged_forward() -> Patch:
    """Rows = unmerged.

    Both packings are the same function of the weights wherever the paths of a row agree about the
    routes of the tokens that they share, so the norm moves by rounding alone. Where it moves by
    more, the merged row forces routes that a path did not take. The loss is that of the recorded
    rows, and each token trains once, in the path that the trainer chose. It touches nothing where
    no row is a prefix tree.
    """
    return rows_patch("unmerged")
