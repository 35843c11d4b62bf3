"""Notes survive what is rendered around them, and what cannot survive is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_lib.record.notes import END, START, join, split

HEAD, TAIL = "# A task\n\n| a | b |\n\n", "\n## More\n\ntext\n"


def is_note(text: bytes) -> bool:
    return not any(line.strip() in (START, END) for line in text.split(b"\n"))


NOTES = st.binary(max_size=200).map(lambda b: b + b"\n" if b else b).filter(is_note)


@given(NOTES, st.sampled_from([("", ""), (HEAD, TAIL), ("é\n", "")]))
def test_notes_come_back_byte_for_byte(text: bytes, around: tuple[str, str]) -> None:
    written = join(around[0], text, around[1])
    assert split(written) == (text, False)
    assert split(join("another\n", split(written)[0] or b"", "")) == (text, False)


@given(NOTES, st.integers(0, 10_000), st.binary(min_size=1, max_size=3))
def test_an_edit_anywhere_is_among_the_notes_or_told(text: bytes, at: int, typed: bytes) -> None:
    written = join(HEAD, text, TAIL)
    place = at % (len(written) + 1)
    edited = written[:place] + typed + written[place:]
    noted = split(edited)
    inside = noted.notes is not None and typed in noted.notes and noted.notes != text
    harmless = edited.split() == written.split()  # white space at the end of a line
    assert noted.touched or inside or harmless


def test_ends_of_lines_of_another_system_are_no_edit() -> None:
    written = join(HEAD, b"mine\n", TAIL)
    assert split(written.replace(b"\n", b"\r\n")) == (b"mine\r\n", False)
    assert split(written.rstrip()) == (b"mine\n", False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b.replace(START, b""),
        lambda b: b.replace(END, b""),
        lambda b: b.replace(END, END + b"\n" + END),
        lambda b: b.replace(START, b"x").replace(END, START).replace(b"x", END),
        lambda b: b"",
    ],
)
def test_damaged_markers_are_seen(damage) -> None:
    assert split(damage(join(HEAD, b"mine\n", TAIL))) == (None, True)
