"""Beside recorded methods in a real session: the same gradient is seen, and another one is not."""

from __future__ import annotations

import pytest

from replay_lib.case import builtin_cases
from replay_lib.errors import PatchError
from replay_lib.method_cards.writing import Wish, record_method
from replay_lib.record.task import Task
from replay_lib.run import ReplayOptions
from tests.method_cards.make_cards import JOB, METHOD, own_methods, result, some_cards
from tests.report.make_task import keep_run, results_of

SNAPSHOT = builtin_cases() / "zoo-natural" / "snapshot" / "iter_0000061"


@pytest.mark.xdist_group("zoo-natural")
def test_a_recorded_method_under_another_name_is_seen_by_its_gradient(tmp_path, monkeypatch):
    own = f"{own_methods(tmp_path / 'own', monkeypatch)}:stay_near"
    task = Task(JOB, tmp_path)
    keep_run(task, "a" * 12, [results_of("zoo-natural")[0], result(own)], snapshot=str(SNAPSHOT))
    cards = some_cards(tmp_path / "cards")
    before = {f.name: f.read_bytes() for f in cards.iterdir()}
    wish = Wish(method=own, rationale="It bounds what one token can weigh.")
    # clip-advantages acts at that seam too, and is not named
    told = rf"at the same seam, {METHOD} \(cosine 1\.000000\)\. Replay"
    with pytest.raises(PatchError, match=told):
        record_method(task, wish, ReplayOptions(device="cpu"), cards, lambda: None)
    assert {f.name: f.read_bytes() for f in cards.iterdir()} == before
