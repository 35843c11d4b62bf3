"""One card a method: what is published about it, the patch, and our own results.

A card is ``spike-mitigation-methods/<slug>.md``, written by hand except for one block between two
markers, which is rendered from results, and one for each task that the method was recorded from
(:mod:`replay_lib.method_cards`). ``README.md`` beside the cards is their index and wholly
generated. A mitigation without a card, or a card without a mitigation, is an error; a card that
declares itself what its method is needs none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from tabulate import tabulate

from replay_lib import layout
from replay_lib.engine.protocol import Frozen
from replay_lib.errors import PatchError, fault
from replay_lib.patch import Mitigation
from replay_lib.record.result import Result
from replay_lib.record.standing import latest, standing_of
from replay_lib.record.table import COLUMNS
from replay_lib.rule import Status
from replay_lib.writing import replace_file

SECTIONS = ("Description", "Status", "Published evidence", "Patch", "Our results")
BLOCK_START = "<!-- results: generated, do not edit -->"
BLOCK_END = "<!-- end of results -->"
NO_RESULT = "No result is recorded yet."
INDEX = "README.md"
CIRCUMSTANCES = ("dtype", "device", "repeats", "spread", "date")

_BLOCK = re.compile(f"{re.escape(BLOCK_START)}\n(.*?)\n{re.escape(BLOCK_END)}", re.DOTALL)
_CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_STATUS = re.compile(r"^Status: (\w+)\b", re.MULTILINE)
_DECLARED = re.compile(r"^<!-- declared: (.*) -->$", re.MULTILINE)
_RECORDED = re.compile(
    r"<!-- recorded: (.*?); generated, do not edit -->\n(.*?)\n<!-- end of recorded -->", re.DOTALL
)
_PATCH = re.compile(
    r"<!-- patch: generated, do not edit -->\n.*?\n<!-- end of patch -->", re.DOTALL
)


class Declared(Frozen):
    """What a method is, said by its own card: that of a method that is registered nowhere.

    ``method`` is how a command line names it, ``parameters`` those it was recorded with.
    """

    method: str
    family: str
    seams: tuple[str, ...]
    parameters: dict[str, Any] = Field(default_factory=dict)
    summary: str

    def line(self) -> str:
        """As the card has it; ``>`` is escaped, so that no text ends the comment."""
        return f"<!-- declared: {self.model_dump_json().replace('>', chr(92) + 'u003e')} -->"


@dataclass(frozen=True)
class Card:
    """One method's card as it stands on disk."""

    slug: str
    file: Path
    text: str

    @property
    def code(self) -> list[str]:
        """Its Python code blocks; the first one defines ``patch``."""
        return _CODE.findall(self.text)

    @property
    def status(self) -> str:
        """The best that recorded results or tasks gave, ``-`` while there are none."""
        blocks = [*_BLOCK.findall(self.text), *(text for _, text in _RECORDED.findall(self.text))]
        found = {word for block in blocks for word in _STATUS.findall(block)[:1]}
        return next(
            (str(status) for status in Status if status in found),
            "-" if not found else sorted(found)[0],
        )

    @property
    def declared(self) -> Declared | None:
        """What the card itself says of its method; PatchError where it cannot be read."""
        found = _DECLARED.search(self.text)
        if found is None:
            return None
        try:
            return Declared.model_validate_json(found[1])
        except ValidationError as error:
            told = str(error).splitlines()[0]
            raise PatchError(fault(self.file, "declared", told, "what a method is")) from error

    def with_patch(self, declared: Declared, code: str) -> Card:
        """The card with ``code`` and what it declares, where both were generated before."""
        text = _DECLARED.sub(lambda _: declared.line(), self.text)
        return Card(self.slug, self.file, _PATCH.sub(lambda _: patch_block(code), text))

    def with_recorded(self, name: str, inside: str) -> Card:
        """The card with the block ``name`` in place of the one of that name, else at its end."""
        shown = name.replace(">", "&gt;")
        head = f"<!-- recorded: {shown}; generated, do not edit -->"
        block = f"{head}\n{inside}\n<!-- end of recorded -->"
        for found in _RECORDED.finditer(self.text):
            if found[1] == shown:
                text = self.text[: found.start()] + block + self.text[found.end() :]
                return Card(self.slug, self.file, text)
        return Card(self.slug, self.file, f"{self.text.rstrip()}\n\n{block}\n")

    def faults(self) -> list[str]:
        """What is wrong with the card itself."""
        found = re.findall(r"^## (.+)$", self.text, re.MULTILINE)
        wrong = []
        if found != list(SECTIONS):
            wrong.append(fault(self.file, "sections", ", ".join(found), ", ".join(SECTIONS)))
        if not self.code:
            wrong.append(fault(self.file, "Patch", "no code block", "one in ```python"))
        blocks = len(_BLOCK.findall(self.text))
        if blocks != 1:
            expected = f"one between {BLOCK_START} and {BLOCK_END}"
            wrong.append(fault(self.file, "generated block", f"{blocks}", expected))
        return wrong


def patch_block(code: str) -> str:
    """A method's code as a card has it that was not written by hand."""
    head, end = "<!-- patch: generated, do not edit -->", "<!-- end of patch -->"
    return f"{head}\n```python\n{code.rstrip()}\n```\n{end}"


def cards_dir() -> Path:
    """The directory of the cards: packaged in an installation, else the repository's."""
    package = Path(__file__).parents[1]
    packaged = package / "_builtin" / layout.CARDS
    return packaged if packaged.is_dir() else package.parent / layout.CARDS


def read_cards(directory: Path | None = None) -> dict[str, Card]:
    """All cards by slug, in alphabetical order."""
    folder = cards_dir() if directory is None else directory
    if not folder.is_dir():
        raise PatchError(fault(folder, None, "no such directory", "a directory of cards"))
    files = sorted(f for f in folder.glob("*.md") if f.name != INDEX)
    return {f.stem: Card(f.stem, f, f.read_text(encoding="utf-8")) for f in files}


def check_cards(methods: Mapping[str, Mitigation], cards: Mapping[str, Card]) -> None:
    """Raise one PatchError with everything that is wrong between methods and cards."""
    wrong = [f"mitigation {slug} has no card" for slug in sorted(set(methods) - set(cards))]
    for slug in sorted(set(cards) - set(methods)):
        if cards[slug].declared is None:
            wrong.append(f"card {cards[slug].file.name} has no mitigation")
    for card in cards.values():
        wrong += card.faults()
    if wrong:
        raise PatchError("\n".join(wrong))


def update_cards(
    results: Sequence[Result], methods: Mapping[str, Mitigation], directory: Path | None = None
) -> list[Path]:
    """Render the results into the cards and the index; returns the files that changed.

    A card whose method does not occur in ``results`` is left as it is. Raises PatchError where
    methods and cards do not fit each other; nothing is written then.
    """
    cards = read_cards(directory)
    check_cards(methods, cards)
    new = dict(cards)
    for slug, card in cards.items():
        own = [r for r in results if slug in _slugs(r)]
        if own:
            new[slug] = _with_block(card, render_block(slug, own))
    changed = [c.file for s, c in new.items() if c.text != cards[s].text]
    texts = {c.file: c.text for c in new.values()}
    index = (cards_dir() if directory is None else directory) / INDEX
    texts[index] = render_index(methods, new)
    if not index.is_file() or index.read_text(encoding="utf-8") != texts[index]:
        changed.append(index)
    for file in changed:
        replace_file(file, texts[file].encode("utf-8"))
    return changed


def render_block(slug: str, results: Sequence[Result]) -> str:
    """The generated block's inside: the method's status, then one line a result.

    Of several results of one experiment on one device the last counts.
    """
    shown = sorted(latest(results), key=lambda r: (r.case, r.experiment, r.device, r.dtype))
    if not shown:
        return NO_RESULT
    table = tabulate(
        [[cell(r) for _, cell in COLUMNS] + _circumstances(r) for r in shown],
        headers=[*(title for title, _ in COLUMNS), *CIRCUMSTANCES],
        tablefmt="github",
        disable_numparse=True,
    )
    lines = [f"Status: {standing_of(slug, shown).told()}.", "", table]
    mechanism = sorted({r.case for r in shown if r.evidence == "mechanism"})
    if mechanism:
        told = f"The median of {', '.join(mechanism)} was not measured: ratio and verdict there"
        lines += ["", f"{told} show the mechanism, not the method's worth."]
    return "\n".join(lines)


def _circumstances(result: Result) -> list[str]:
    """Under which :data:`CIRCUMSTANCES` a result was got; ``spread`` is the baselines' own."""
    repeats = "-" if result.repeats is None else str(result.repeats)
    spread = "-" if result.repeat_spread is None else f"{result.repeat_spread:.2g}"
    return [result.dtype, result.device, repeats, spread, result.timestamp[:10]]


def render_index(methods: Mapping[str, Mitigation], cards: Mapping[str, Card]) -> str:
    """The folder's README: one line a method, from what it declares and what its card says."""
    rows = [_index_row(card, methods.get(slug)) for slug, card in sorted(cards.items())]
    headers = ["method", "family", "seams", "parameters", "status", "what it does"]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return (
        "<!-- generated by replay_lib.record.cards, do not edit -->\n"
        "# Spike mitigation methods\n\n"
        "Each card states what is published about a method, the patch that replays it, and the\n"
        "results recorded here. Status: `proven`, `partial` (at least 15% reduction),\n"
        "`diagnostic` (it changes what the training means), `negative`; `-` while no result is\n"
        "recorded. The rule is in [docs/side-effects.md](../docs/side-effects.md).\n\n"
        f"{table}\n"
    )


def _index_row(card: Card, method: Mitigation | None) -> list[str]:
    """A registered method tells of itself; of any other its card does."""
    told = card.declared
    if method is not None:
        told = Declared(
            method=method.slug,
            family=method.family,
            seams=tuple(map(str, method.seams)),
            parameters=method.defaults,
            summary=method.summary,
        )
    if told is None:
        raise PatchError(f"card {card.file.name} has no mitigation")
    return [
        f"[{card.slug}]({card.slug}.md)",
        told.family,
        ", ".join(told.seams),
        ", ".join(f"`{k}={v!r}`" for k, v in told.parameters.items()) or "-",
        card.status,
        told.summary.replace("|", "\\|"),
    ]


def _slugs(result: Result) -> set[str]:
    return {call.slug for call in result.mitigations}


def _with_block(card: Card, inside: str) -> Card:
    block = f"{BLOCK_START}\n{inside}\n{BLOCK_END}"
    # a function as replacement: backslashes in a table are no escapes
    return Card(card.slug, card.file, _BLOCK.sub(lambda _: block, card.text))
