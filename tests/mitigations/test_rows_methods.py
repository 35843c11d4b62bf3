"""Methods that change how merged rows are packed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hand_made import METHODS, only_patch
from tree_shapes import PREFIX, SINGLE, TWICE, merged_batch

from replay_lib.engine.apply import apply_patches
from replay_lib.engine.inputs import RankInput, rank_input
from replay_lib.errors import PatchError
from replay_lib.loss import GrpoSettings
from replay_lib.patch import Seam, rows_patch

MODEL = SimpleNamespace(moe_layers=(True,), topk=2, experts=4, vocab=50)


def ranks(*shapes) -> list[RankInput]:
    rows = merged_batch(shapes, vocab=50, layers=1, experts=4, topk=2, width=40)
    return [rank_input(rows, [range(len(shapes))], MODEL, replay=True, loss_tokens_only=False)]


def test_it_unmerges_and_counts_the_rows_of_several_paths():
    patch = only_patch("disable-merged-forward")
    assert patch.seam is Seam.ROWS and METHODS["disable-merged-forward"].family == "rows"
    patched = apply_patches([patch], ranks(TWICE, SINGLE, PREFIX), GrpoSettings())
    assert patched.rows == "unmerged" and patched.touched == {Seam.ROWS: 2}


@pytest.mark.parametrize(
    ("shapes", "session"), [((SINGLE,), "merged"), ((TWICE,), "unmerged")], ids=["flat", "done"]
)
def test_it_touches_nothing_where_nothing_is_merged(shapes, session):
    patch = only_patch("disable-merged-forward")
    patched = apply_patches([patch], ranks(*shapes), GrpoSettings(), session)
    assert patched.touched == {Seam.ROWS: 0}


def test_other_patches_leave_the_rows_as_the_session_has_them():
    patch = only_patch("disable-routing-replay")
    assert apply_patches([patch], ranks(TWICE), GrpoSettings()).rows == "merged"
    assert apply_patches([patch], ranks(TWICE), GrpoSettings(), "unmerged").rows == "unmerged"


def test_an_unknown_packing_is_refused():
    with pytest.raises(PatchError, match="a rows patch must give one of merged, unmerged; it gave"):
        apply_patches([rows_patch("sideways")], ranks(TWICE), GrpoSettings())
