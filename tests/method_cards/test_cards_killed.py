"""SIGKILL at 50 random points: the old card or the new one, and an index that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.method_cards import killed_cards
from tests.method_cards.make_cards import JOB, result, some_cards, task_with

ROUNDS = 50


def test_a_killed_recording_leaves_the_old_card_or_the_new_one(tmp_path):
    task_with(tmp_path, result(), signals=False)
    cards = some_cards(tmp_path / "cards")
    top = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, killed_cards.__file__, tmp_path, cards, JOB, str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(top)},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    assert told["odd"] == []
    assert told["killed"] == ROUNDS
    assert min(told["seen"].values()) > 0  # before the card, between card and index, after both
