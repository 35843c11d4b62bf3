"""A method's card out of a ledger: new, updated, refused; and the index beside it."""

from __future__ import annotations

import json
import re

import pytest

from replay_lib.cli import record_method as command
from replay_lib.errors import BatchError, PatchError, UsageError
from replay_lib.method_cards.writing import Wish, Written, record_method
from replay_lib.methods import load_methods
from replay_lib.record import ledger
from replay_lib.record.cards import INDEX, check_cards, read_cards, render_index
from replay_lib.rule import Status, Verdict
from replay_lib.run import ReplayOptions
from tests.cli_ran import Ran
from tests.method_cards.make_cards import (
    JOB,
    METHOD,
    ROLE,
    fake_engine,
    own_methods,
    result,
    some_cards,
    task_with,
)

WHY = "It bounds what <b>one</b> token can weigh."
SHOWN = WHY.replace("<", "&lt;").replace(">", "&gt;")
OPTIONS = ReplayOptions()


def record(task, cards, method=METHOD, rationale=WHY, **wish) -> Written:
    asked = Wish(method=method, rationale=rationale, **wish)
    return record_method(task, asked, OPTIONS, cards, lambda: None)


def index_is_generated(cards) -> bool:
    return (cards / INDEX).read_text() == render_index(load_methods(), read_cards(cards))


def test_a_hand_written_card_keeps_every_line_and_gains_a_block(tmp_path, monkeypatch):
    engine = fake_engine(monkeypatch)
    task, cards = task_with(tmp_path, result()), some_cards(tmp_path / "cards")
    before = (cards / f"{METHOD}.md").read_text()
    written = record(task, cards)
    assert (written.status, written.new) == (Status.PROVEN, False)
    text = (cards / f"{METHOD}.md").read_text()
    assert text.startswith(before.rstrip())
    added = text[len(before.rstrip()) :].replace("\\", "")
    for owed in (
        f"### {JOB}, step 61",
        "Status: proven (pass of zoo-natural).",
        ROLE,
        "checkpoints/spike_snapshots-active/iter_0000061",
        "1.008135, median 0.2699192",
        "ratio 0.9982",
        "73.3% under the baseline",
        "sign imbalance",
        "Residual spike: ratio 0.9982, at or under the target 1.5",
        "would stay silent",
        "Rationale: It bounds what &lt;b&gt;one&lt;/b&gt; token can weigh.",
        "1 recorded method acts at the same seams, nearest clip-advantages (cosine 0.500)",
    ):
        assert owed in added, owed
    assert "&lt;b&gt;" in text
    assert read_cards(cards)[METHOD].status == "proven" and index_is_generated(cards)
    assert engine.asked == [[METHOD], ["clip-advantages"]] and engine.closed == 1
    event = ledger.read(task)[-1]
    assert event.kind == "recorded" and event.data == {
        "method": METHOD,
        "card": str(cards / f"{METHOD}.md"),
        "status": "proven",
        "experiment": METHOD,
        "rationale": WHY,
    }


def test_recording_again_changes_nothing_but_what_is_new(tmp_path, monkeypatch):
    fake_engine(monkeypatch)
    task, cards = task_with(tmp_path, result()), some_cards(tmp_path / "cards")
    record(task, cards)
    card = cards / f"{METHOD}.md"
    card.write_text(card.read_text().replace("## Status\n", "## Status\n\nMine.\n"))
    before = card.read_text()
    record(task, cards, rationale=None)  # the one of before
    assert card.read_text() == before
    record(task, cards, rationale="Another.")
    assert card.read_text() == before.replace(SHOWN, "Another.")
    other = task_with(tmp_path / "elsewhere", result(verdict=Verdict.PARTIAL, case="b"))
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    renamed = type(task)("other-job", other.root)
    renamed.ledger.write_bytes(other.ledger.read_bytes())
    record(renamed, cards)
    assert len(re.findall("^### ", card.read_text(), re.MULTILINE)) == 2
    assert read_cards(cards)[METHOD].status == "proven"  # the better one


def test_a_function_of_ones_own_gets_a_card_whose_code_runs(tmp_path, monkeypatch):
    fake_engine(monkeypatch)
    method = f"{own_methods(tmp_path / 'own', monkeypatch)}:stay_near"
    task = task_with(tmp_path, result(method, params={"factor": 0.5}))
    cards = tmp_path / "new" / "cards"
    written = record(task, cards, method)
    assert (written.card, written.new) == (cards / "stay-near.md", True)
    card = read_cards(cards)["stay-near"]
    assert card.faults() == [] and card.status == "proven"
    assert card.declared.method == method and card.declared.parameters == {"factor": 0.5}
    names: dict[str, object] = {}
    exec(compile(card.code[0], "card", "exec"), names)
    assert names["patch"].seam == "batch"
    assert "In nats, on loss tokens > elsewhere | nowhere." in card.text
    assert "None: it was recorded from a task of this repository." in card.text
    assert index_is_generated(cards)
    assert (
        "| [stay-near](stay-near.md) | user     | batch   | `factor=0.5` | proven   |"
        in (cards / INDEX).read_text()
    )
    check_cards({}, read_cards(cards))  # it needs no registered method
    own = tmp_path / "own" / "own_spike_methods.py"
    own.write_text(own.read_text().replace("BOUND = 0.1", "BOUND = 0.2"))
    record(task, cards, method)  # the figures are checked by the replay; the code follows
    assert "BOUND = 0.2" in read_cards(cards)["stay-near"].code[0]


def test_the_next_own_method_is_compared_with_the_first_as_it_was_recorded(tmp_path, monkeypatch):
    engine = fake_engine(monkeypatch)
    first = f"{own_methods(tmp_path / 'own', monkeypatch)}:stay_near"
    task = task_with(tmp_path, result(first, params={"factor": 0.5}), result())
    record(task, tmp_path / "cards", first)
    record(task, tmp_path / "cards", METHOD)
    assert engine.asked[-1] == [f"{first}:factor=0.5"]


@pytest.mark.parametrize(
    ("cosine", "same"), [(0.9991, True), (0.999, False), (-1.0, False), (None, False)]
)
def test_a_new_method_that_is_a_recorded_one_is_refused(tmp_path, monkeypatch, cosine, same):
    fake_engine(monkeypatch, {"clip-advantages": cosine})
    method = f"{own_methods(tmp_path / 'own', monkeypatch)}:stay_near"
    task, cards = task_with(tmp_path, result(method)), some_cards(tmp_path / "cards")
    before = {f.name: f.read_bytes() for f in cards.iterdir()}
    if not same:
        assert record(task, cards, method).new
        return
    with pytest.raises(PatchError) as caught:
        record(task, cards, method)
    assert str(caught.value) == (
        f"{method} on zoo-natural is not recorded: its gradient is that of a recorded method at "
        "the same seam, clip-advantages (cosine 0.999100). Replay and record that one"
    )
    assert {f.name: f.read_bytes() for f in cards.iterdir()} == before
    assert ledger.read(task)[-1].kind == "ended"


def test_methods_at_other_seams_are_not_replayed(tmp_path, monkeypatch):
    engine = fake_engine(monkeypatch, {"clip-advantages": 1.0})
    method = f"{own_methods(tmp_path / 'own', monkeypatch)}:two_at_once"
    task, cards = task_with(tmp_path, result(method)), some_cards(tmp_path / "cards")
    written = record(task, cards, method)
    assert engine.asked == [[method]] and written.beside.cosines == {}
    assert "none was replayed that acts at the same seams" in written.card.read_text()


def test_a_recorded_method_that_this_step_cannot_take_is_told(tmp_path, monkeypatch):
    gone = BatchError("the batch has no column x")
    fake_engine(monkeypatch, {"clip-advantages": gone})
    slugs = (METHOD, "clip-advantages", "centre-advantages")
    cards = some_cards(tmp_path / "cards", *slugs)
    written = record(task_with(tmp_path, result()), cards)
    assert written.beside.untold == {"clip-advantages": "the batch has no column x"}
    assert written.beside.cosines == {"centre-advantages": 0.5}


def test_a_method_that_does_something_else_by_now_is_refused(tmp_path, monkeypatch):
    engine = fake_engine(monkeypatch, norm=0.27)
    task, cards = task_with(tmp_path, result()), some_cards(tmp_path / "cards")
    with pytest.raises(PatchError, match=r"its norm is 0.27 now, found 0.2694434 in the ledger"):
        record(task, cards)
    assert engine.closed == 1 and not re.search("recorded:", (cards / f"{METHOD}.md").read_text())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"verdict": Verdict.FAIL}, "is not recorded: its verdict is fail"),
        ({"fidelity": "reduced", "verdict": Verdict.NO_OP}, "is not recorded:\n  its verdict"),
    ],
)
def test_what_is_nothing_to_record_needs_no_replay(tmp_path, monkeypatch, changes, told):
    engine = fake_engine(monkeypatch)
    cards = some_cards(tmp_path / "cards")
    with pytest.raises(PatchError) as caught:
        record(task_with(tmp_path, result(**changes)), cards)
    assert told in str(caught.value) and engine.asked == []


def test_a_rationale_is_asked_for_and_needed(tmp_path, monkeypatch):
    fake_engine(monkeypatch)
    task, cards = task_with(tmp_path, result()), some_cards(tmp_path / "cards")
    with pytest.raises(UsageError, match="found no rationale, expected why it works: --rationale"):
        record(task, cards, rationale=None)
    wish = Wish(method=METHOD)
    written = record_method(task, wish, OPTIONS, cards, lambda: "Typed.")
    assert "Rationale: Typed." in written.card.read_text()


def test_a_snapshot_that_is_gone_says_so(tmp_path, monkeypatch):
    fake_engine(monkeypatch)
    task = task_with(tmp_path, result())
    for place in sorted((tmp_path / "outputs").rglob("*"), reverse=True):
        place.rmdir()
    with pytest.raises(UsageError, match="recorded before its snapshot is released"):
        record(task, some_cards(tmp_path / "cards"))


def test_a_name_that_a_registered_method_has_is_refused(tmp_path, monkeypatch):
    fake_engine(monkeypatch)
    module = own_methods(tmp_path / "own", monkeypatch)
    file = tmp_path / "own" / f"{module}.py"
    file.write_text(file.read_text().replace("def stay_near", "def clip_advantages"))
    method = f"{module}:clip_advantages"
    with pytest.raises(
        PatchError, match="found a registered method clip-advantages under the name"
    ):
        record(task_with(tmp_path, result(method)), tmp_path / "cards", method)


def test_a_card_of_that_name_that_is_another_methods_is_left_alone(tmp_path, monkeypatch):
    fake_engine(monkeypatch)
    module = own_methods(tmp_path / "own", monkeypatch)
    cards = some_cards(tmp_path / "cards")
    (cards / "stay-near.md").write_text("# mine\n")
    task = task_with(tmp_path, result(f"{module}:stay_near"))
    with pytest.raises(PatchError, match=r"stay-near\.md: found a card of another method"):
        record(task, cards, f"{module}:stay_near")
    assert (cards / "stay-near.md").read_text() == "# mine\n"


def test_a_method_from_a_directory_gets_a_card_too(tmp_path, monkeypatch):
    fake_engine(monkeypatch)
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "stay_close.py").write_text(
        "from replay_lib.patch import mitigation, settings_patch\n\n\n"
        '@mitigation(slug="stay-close", family="settings", summary="Close | by.", source="mine")\n'
        "def stay_close(at: float = 2.0):\n"
        "    return settings_patch(mismatch_token_clip_max=at)\n"
    )
    options = ReplayOptions(mitigations=(folder,))
    task = task_with(tmp_path, result("stay-close"))
    wish = Wish(method="stay-close", rationale=WHY)
    cards = tmp_path / "cards"
    card = read_cards(cards) if cards.is_dir() else {}
    assert card == {}
    record_method(task, wish, options, cards, lambda: None)
    card = read_cards(cards)["stay-close"]
    assert card.code[0].endswith("(patch,) = stay_close.patches()\n")
    assert "Its source, as declared: mine; it was recorded from a task" in card.text
    assert "Close \\| by." in (cards / INDEX).read_text()


def test_the_command_tells_what_it_wrote(tmp_path, monkeypatch, capsys):
    fake_engine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    task_with(tmp_path.relative_to(tmp_path), result())
    cards = some_cards(tmp_path / "spike-mitigation-methods")
    ran = Ran(capsys, "record-method", METHOD, "--task", JOB, "--rationale", WHY)
    assert ran.code == 0
    assert ran.out == f"{METHOD}: proven. spike-mitigation-methods/{METHOD}.md is added to.\n"
    told = Ran(capsys, "record-method", METHOD, "--task", JOB, "--json").document
    assert told["status"] == "proven" and told["cosines"] == {"clip-advantages": 0.5}
    assert index_is_generated(cards)
    refused = Ran(capsys, "record-method", "nothing", "--task", JOB, "--json")
    assert refused.code == 2 and json.loads(refused.out)["error"]["code"] == "usage"
    assert command._asker(True)() is None
