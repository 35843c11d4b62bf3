"""Text from snapshots, errors and command lines, put into Markdown as the text that it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"})
_MARKS = re.compile(r"([\\`*\[\]~!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def visible(text: str) -> str:
    """``text`` on one line; what would not be seen (controls, marks of direction) is spelled."""
    line = " ".join(text.split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return "".join(shown)


def plain(text: str) -> str:
    """``text`` as one line that no reader of Markdown or HTML takes for anything but text."""
    return _MARKS.sub(r"\\\1", visible(text)).translate(_HTML)


def code(text: str) -> str:
    """``text`` as one line of code in running text; not for a table, where ``|`` would split it."""
    line = visible(text)
    if not line:
        return ""
    fence = "`" * (_longest_run(line) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"


def block(text: str) -> str:
    """``text`` as a block of code of one line, to be copied as it is."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}sh\n{visible_command(text)}\n{fence}"


def visible_command(text: str) -> str:
    """A command on one line: spaces inside it count, so only what ends a line is written out."""
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are text; no number is parsed again."""
    cells = [[plain(cell) for cell in row] for row in rows]
    return tabulate(cells, headers=list(titles), tablefmt="github", disable_numparse=True)


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
