"""Plots as SVG that stands inside a page: colours from its style sheet, text as text, names unique.

Drawn by matplotlib on a canvas of its own; nothing of pyplot is used, and its settings hold for
one plot. Each plot is drawn twice, for a desk and for a phone: a wide one that is shrunk cannot be
read.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A colour for matplotlib, and the variable of the style sheet that it stands for.
INK, MUTED, GRID, CARD = "#010101", "#020202", "#030303", "#040404"
BLUE, ORANGE, GREEN, RED, PURPLE = "#050505", "#060606", "#070707", "#080808", "#090909"
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "line",
    CARD: "card",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    RED: "red",
    PURPLE: "purple",
}
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
    "svg.hashsalt": "spike-replay",  # equal plots are equal files
    "text.parse_math": False,  # a name with $ is a name
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
}
_POINTS = 72.0  # an inch; one point is one pixel of the page where a plot is not scaled


@dataclass(frozen=True)
class Size:
    """Of a plot, in points; ``narrow``: for a phone."""

    width: float
    height: float
    narrow: bool


WIDE, NARROW = 720.0, 340.0
Draw = Callable[["Figure", Size], None]


@dataclass(frozen=True)
class Plot:
    """A plot in both widths; ``alt`` says in words what it shows."""

    name: str
    title: str
    alt: str
    wide: Markup
    narrow: Markup


def plot(
    name: str,
    title: str,
    alt: str,
    *,
    draw: Draw,
    height: float,
    narrow_height: float | None = None,
) -> Plot:
    """Draw ``name`` (a word, unique on its page) at both widths; heights are in points."""
    sizes = (
        Size(WIDE, height, narrow=False),
        Size(NARROW, height if narrow_height is None else narrow_height, narrow=True),
    )
    wide, narrow = (
        Markup(_inline(_drawn(draw, size), f"{name}-{int(size.width)}", title, alt))
        for size in sizes
    )
    return Plot(name, title, alt, wide, narrow)


def axes_of(figure: Figure) -> Axes:
    """One pair of axes that fills ``figure``."""
    return figure.add_subplot()


@contextmanager
def _settings(size: Size) -> Iterator[None]:
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS | {"font.size": 10.5 if size.narrow else 9.5}):
        yield


def _drawn(draw: Draw, size: Size) -> str:
    """A whole SVG document."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _settings(size):
        inches = (size.width / _POINTS, size.height / _POINTS)
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure, size)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _inline(text: str, name: str, title: str, alt: str) -> str:
    """The ``<svg>`` element alone, named and described; matplotlib has escaped all its text."""
    inside = text[text.index("<svg") :].partition(">")[2]
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", inside)
    for colour, variable in _VARIABLES.items():
        inside = inside.replace(colour, f"var(--{variable})")
    inside = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inside, flags=re.DOTALL)
    inside = re.sub(r"(font-family:|font: [^;\"]*?px) [^;\"]+", r"\1 var(--font)", inside)
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None, "matplotlib states a viewBox"
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title {name}-alt">'
        f'<title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-alt">{html.escape(alt)}</desc>{inside.strip()}'
    )


def shortened(text: str, length: int) -> str:
    """``text`` with its middle left out where it is longer than ``length``."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"
