"""Record a method that a task has proven: its card, the index of all cards, the ledger."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from replay_lib.errors import PatchError, UsageError, fault
from replay_lib.method_cards.beside import Beside, compare, recorded_at
from replay_lib.method_cards.candidate import Candidate, choose, refusals
from replay_lib.method_cards.entry import render_card, render_entry
from replay_lib.method_cards.source import code_of
from replay_lib.methods import find, load_methods
from replay_lib.patch import Mitigation
from replay_lib.record import ledger
from replay_lib.record.cards import INDEX, Card, Declared, read_cards, render_index
from replay_lib.record.result import Result
from replay_lib.record.results_file import LOCK_SECONDS
from replay_lib.record.task import Task
from replay_lib.report.facts import Facts, facts_of
from replay_lib.rule import Status
from replay_lib.run import ReplayOptions, open_engine
from replay_lib.writing import replace_file

_WORD = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Written:
    """A recorded method: its card, the status, and whether the card is new."""

    method: str
    card: Path
    status: Status
    new: bool
    beside: Beside


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be recorded: ``method`` as results name it, ``experiment`` with its parameters.

    ``rationale`` None: the one that was given before.
    """

    method: str
    experiment: str | None = None
    rationale: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Case:
    """All that is known before anything is replayed."""

    facts: Facts
    candidate: Candidate
    method: Mitigation
    slug: str
    code: str  # "" for a method whose card is written by hand
    cards: Mapping[str, Card]
    methods: Mapping[str, Mitigation]

    @property
    def declared(self) -> Declared:
        """What a card of its own says of the method."""
        call = self.candidate.experiment.mitigations[0]
        return Declared(
            method=call.slug,
            family=self.method.family,
            seams=self.seams,
            parameters=call.params,
            summary=self.method.summary,
        )

    @property
    def seams(self) -> tuple[str, ...]:
        """Where its patches act, in their order."""
        patches = self.method.patches(self.candidate.experiment.mitigations[0].params)
        return tuple(dict.fromkeys(str(patch.seam) for patch in patches))


def record_method(
    task: Task, wish: Wish, options: ReplayOptions, directory: Path, ask: Callable[[], str | None]
) -> Written:
    """Write or update the card of ``wish.method`` in ``directory``, and the index beside it.

    ``ask`` is asked for a rationale where none was ever given. UsageError and PatchError say what
    is missing or why there is nothing to record; then nothing is written.
    """
    facts = facts_of(task.job, task.ledger, ledger.read(task))
    case = _look(facts, wish, options, directory)
    rationale = wish.rationale or _earlier(facts, case.candidate) or ask()
    if not rationale or not rationale.strip():
        raise UsageError(
            f"{wish.method}: found no rationale, expected why it works: --rationale TEXT"
        )
    beside = _beside(case, options)
    if beside.same and case.slug not in case.cards:
        raise PatchError(_duplicate(case.candidate, beside))
    entry = render_entry(facts, case.candidate, beside, rationale)
    card = _write(directory, case, entry)
    status = case.candidate.status
    ledger.append(
        task,
        "recorded",
        method=wish.method,
        card=str(card.file),
        status=str(status),
        experiment=case.candidate.result.experiment,
        rationale=rationale,
    )
    return Written(wish.method, card.file, status, case.slug not in case.cards, beside)


def _look(facts: Facts, wish: Wish, options: ReplayOptions, directory: Path) -> _Case:
    """What is to be recorded, or the error that says why it is not."""
    methods = load_methods(options.mitigations)
    candidate = choose(facts, wish.method, wish.experiment)
    why = refusals(candidate.result)
    if why:
        raise PatchError(_refused(candidate, why))
    method = find(wish.method, methods)
    slug = slug_of(method, methods)
    cards = _cards(directory)
    _check_own(slug, wish.method, cards, methods)
    by_hand = slug in cards and cards[slug].declared is None
    params = candidate.experiment.mitigations[0].params
    return _Case(
        facts=facts,
        candidate=candidate,
        method=method,
        slug=slug,
        code="" if by_hand else code_of(method, params),
        cards=cards,
        methods=methods,
    )


def slug_of(method: Mitigation, methods: Mapping[str, Mitigation]) -> str:
    """The name of a method's card: its slug, of ``module:function`` the function's name."""
    slug = _WORD.sub("-", method.slug.rpartition(":")[2].lower()).strip("-")
    if ":" in method.slug and slug in methods:
        raise PatchError(
            f"mitigation {method.slug}: found a registered method {slug} under the name of its "
            "card, expected another name. Rename the function, then replay and record it"
        )
    return slug


def _check_own(
    slug: str, method: str, cards: Mapping[str, Card], methods: Mapping[str, Mitigation]
) -> None:
    """PatchError where the card of that name is another method's, or is broken."""
    card = cards.get(slug)
    if card is None:
        return
    told = card.declared
    if slug not in methods and (told is None or told.method != method):
        found = "a card of another method" + (f", {told.method}" if told else "")
        raise PatchError(fault(card.file, None, found, f"one of {method}, or none"))
    if card.faults():
        raise PatchError("\n".join(card.faults()))


def _beside(case: _Case, options: ReplayOptions) -> Beside:
    """One session on the snapshot that the candidate was replayed on, as it was replayed."""
    candidate, result = case.candidate, case.candidate.result
    snapshot = Path(candidate.attempt.snapshot)
    if not candidate.attempt.snapshot or not snapshot.is_dir():
        raise UsageError(
            fault(
                candidate.attempt.snapshot or "the ledger",
                None,
                "no snapshot there",
                "the one that the method was replayed on",
                "A method is recorded before its snapshot is released",
            )
        )
    others = {slug: card for slug, card in case.cards.items() if slug != case.slug}
    found, untold = recorded_at(case.seams, others, case.methods)
    engine = open_engine(snapshot, _as_replayed(options, result))
    try:
        beside = compare(engine, candidate.experiment, found, result)
    finally:
        engine.close()
    return Beside(beside.cosines, {**untold, **beside.untold})


def _as_replayed(options: ReplayOptions, result: Result) -> ReplayOptions:
    """In the dtype and under the trainer's loss of ``result``."""
    known = result.dtype in ("float32", "bfloat16")
    return dataclasses.replace(
        options, precision=result.dtype if known else "recorded", trainer=result.trainer
    )


def _cards(directory: Path) -> dict[str, Card]:
    return read_cards(directory) if directory.is_dir() else {}


def _earlier(facts: Facts, candidate: Candidate) -> str | None:
    """The rationale that this experiment was recorded with before."""
    for event in reversed(facts.events):
        same = event.data.get("experiment") == candidate.result.experiment
        if event.kind == "recorded" and same and event.data.get("rationale"):
            return str(event.data["rationale"])
    return None


def _block(facts: Facts, candidate: Candidate) -> str:
    return f"{facts.job} / {candidate.result.experiment}"


def _write(directory: Path, case: _Case, entry: str) -> Card:
    """Card, then index, each replaced whole, under a lock; what else is there is read again.

    A process that is killed between the two leaves an index that the next one writes anew.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock", timeout=LOCK_SECONDS):
            cards = read_cards(directory)
            card = _anew(directory, cards.get(case.slug), case, entry)
            texts = {card.file: card.text}
            texts[directory / INDEX] = render_index(case.methods, {**cards, case.slug: card})
            for file, text in texts.items():
                content = text.encode("utf-8")
                if not file.is_file() or file.read_bytes() != content:
                    replace_file(file, content)
    except Timeout as error:
        told = f"its lock held for {LOCK_SECONDS} s"
        raise UsageError(fault(directory, None, told, "no other writer")) from error
    except OSError as error:
        told = error.strerror or str(error)
        raise UsageError(fault(directory, None, repr(told), "cards that can be written")) from error
    return card


def _anew(directory: Path, card: Card | None, case: _Case, entry: str) -> Card:
    """The card as it will be; by hand alone nothing is written into one that was."""
    if card is None:
        text = render_card(case.slug, case.method, case.declared, case.code, case.candidate.status)
        card = Card(case.slug, directory / f"{case.slug}.md", text)
    elif case.code:
        card = card.with_patch(case.declared, case.code)
    return card.with_recorded(_block(case.facts, case.candidate), entry)


def _refused(candidate: Candidate, why: list[str]) -> str:
    result = candidate.result
    head = f"{result.experiment} on {result.case} is not recorded"
    return "\n  ".join([head + ":", *why]) if len(why) > 1 else f"{head}: {why[0]}"


def _duplicate(candidate: Candidate, beside: Beside) -> str:
    told = ", ".join(f"{slug} (cosine {beside.cosines[slug]:.6f})" for slug in beside.same)
    return (
        f"{candidate.result.experiment} on {candidate.result.case} is not recorded: its gradient "
        f"is that of a recorded method at the same seam, {told}. Replay and record that one"
    )
