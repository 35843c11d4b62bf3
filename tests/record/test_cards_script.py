"""``benchmarks/cards.py``: results onto cards, and only what is missing is replayed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from make_results import KEPT, outcome, result

from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.record.cards import BLOCK_START, cards_dir
from replay_lib.record.results_file import append_results, read_results
from replay_lib.run import Replayed, ReplayOptions

ROOT = Path(__file__).parents[2]
HERE, THERE = "clip-advantages", "centre-advantages"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("cards", None)
    import cards

    monkeypatch.setattr(cards, "callable_alone", lambda _: [HERE, THERE])
    return cards


def test_what_is_missing_is_replayed_and_all_of_it_rendered(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(cards_dir(), tmp_path / "cards"))
    file = tmp_path / "results.jsonl"
    replayed: list[tuple[str, list[str]]] = []

    def replay(case: Case, asked: list[Experiment], options: ReplayOptions) -> Replayed:
        assert options.device == "cpu"
        replayed.append((case.name, [e.name for e in asked]))
        made = [result(outcome(e.name, 2.5, retained=KEPT)) for e in asked]
        return Replayed(tuple(one.model_copy(update={"case": case.name}) for one in made))

    monkeypatch.setattr(script, "replay_case", replay)
    before = result(outcome(HERE, 2.5, retained=KEPT)).model_copy(update={"case": "zoo-natural"})
    append_results(file, [before])
    assert script.main([str(file), "--replay", "--cards", str(folder)]) == 0
    assert len(replayed) == 6
    assert dict(replayed)["zoo-natural"] == [THERE]
    assert dict(replayed)["zoo-poisoned-row"] == [HERE, THERE]
    assert len(read_results(file)) == 12
    for slug in (HERE, THERE):
        block = (folder / f"{slug}.md").read_text().split(BLOCK_START)[1]
        assert block.count(f"| {slug} ") == 6, block
    replayed.clear()
    script.main([str(file), "--replay", "--cards", str(folder)])  # nothing is missing
    assert replayed == []
