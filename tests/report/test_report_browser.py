"""The page in a real browser: nothing complains, every plot is drawn, a phone needs no sideways
scrolling.

Chromium is driven by its command line alone. A headless window cannot be narrower than 500 pixels,
so the page is measured in a frame of the phone's width.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.report.make_task import PLOTS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is on PATH"
)

#: Runs outside the page, which allows no script: sizes of what is inside the frame.
MEASURE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const inside = frame.contentDocument, root = inside.scrollingElement, width = root.clientWidth;
  const seen = [...inside.querySelectorAll("svg")].filter(s => s.getClientRects().length);
  const shapes = s => [...s.querySelectorAll("path, image, use")].filter(
    one => one.getBoundingClientRect().width > 0).length;
  const texts = [], outside = [];
  for (const plot of seen) {
    const box = plot.getBoundingClientRect();
    for (const text of plot.querySelectorAll("text")) {
      const r = text.getBoundingClientRect();
      texts.push(r);
      if (r.left < box.left - 2 || r.right > box.right + 2) outside.push(text.textContent);
    }
  }
  const broken = [...inside.querySelectorAll("td, th")].filter(cell => {
    const text = cell.textContent.trim(), range = inside.createRange();
    range.selectNodeContents(cell);
    const lines = new Set([...range.getClientRects()].map(r => Math.round(r.bottom)));
    return /^[\\w.]{2,9}$/.test(text) && cell.children.length === 0 && lines.size > 1;
  }).map(cell => cell.textContent.trim());
  document.querySelector("pre").textContent = JSON.stringify({
    broken,
    width, scroll: root.scrollWidth,
    plots: seen.map(s => ({
      name: s.closest("figure").id, shapes: shapes(s), width: s.getBoundingClientRect().width})),
    outside,
    smallest: Math.min(...texts.map(r => Math.min(r.height, r.width > 2 ? r.height : 99))),
    dark: inside.defaultView.getComputedStyle(inside.body).backgroundColor,
  });
};
frame.srcdoc = document.querySelector("template").content.textContent;
"""


def chromium(page: Path, home: Path, *more: str) -> tuple[str, str]:
    """The document as it stands after loading, and what the browser logged."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={home / 'profile'}", *more, "--dump-dom"]
    ran = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr


def complaints(log: str) -> list[str]:
    """What a console of the browser would show."""
    return [line for line in log.splitlines() if "CONSOLE" in line]


def measured(page: str, home: Path, width: int, *more: str) -> Any:
    """Sizes inside a frame that is ``width`` pixels wide."""
    outer = home / "outer.html"
    outer.write_text(
        f"<!doctype html><meta charset=utf-8><template>{html.escape(page)}</template>"
        f'<iframe style="width:{width}px;height:900px;border:0"></iframe><pre></pre>'
        f"<script>{MEASURE}</script>",
        encoding="utf-8",
    )
    dom, log = chromium(outer, home, *more)
    assert complaints(log) == []
    told = re.search(r"<pre>(\{.*\})</pre>", dom)
    assert told is not None, dom[-300:]
    return json.loads(html.unescape(told[1]))


def test_the_console_stays_empty(rendered, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(rendered[1], encoding="utf-8")
    dom, log = chromium(page, tmp_path)
    assert complaints(log) == []
    assert dom.count("<svg") == 2 * len(PLOTS)


def test_a_complaint_would_be_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><script>nothing.is.here()</script>")
    assert len(complaints(chromium(page, tmp_path)[1])) == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_every_plot_is_drawn_and_nothing_scrolls_sideways(rendered, tmp_path, width):
    told = measured(rendered[1], tmp_path, width)
    assert told["scroll"] <= told["width"] <= width
    assert [one["name"] for one in told["plots"]] == [f"plot-{name}" for name in PLOTS]
    assert all(
        one["shapes"] > 5 and one["width"] > 0.75 * min(width, 1000) for one in told["plots"]
    )
    assert told["outside"] == []
    assert told["broken"] == []  # short words of tables, over two lines
    assert told["smallest"] >= 9  # pixels: the height of a line of text


def test_a_page_that_is_too_wide_would_be_seen(rendered, tmp_path):
    wide = rendered[1].replace("<main", '<p style="width:600px">wide</p><main', 1)
    assert measured(wide, tmp_path, 390)["scroll"] > 390


def test_it_is_dark_where_the_reader_wants_it_dark(rendered, tmp_path):
    light = measured(rendered[1], tmp_path, 390)["dark"]
    dark = measured(rendered[1], tmp_path, 390, "--blink-settings=preferredColorScheme=0")["dark"]
    assert (light, dark) == ("rgb(246, 247, 249)", "rgb(18, 22, 28)")
