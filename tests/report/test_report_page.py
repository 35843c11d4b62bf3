"""The page and the text: whole, escaped, self-contained, and telling what is missing."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

from replay_lib.record import ledger
from replay_lib.record.task import Task
from replay_lib.report.page import render_page
from replay_lib.report.plots import shown
from replay_lib.report.text import render_text
from tests.report.make_task import COPY, HOSTILE, JOB, PLOTS, facts, real_results

LARGEST = 2_000_000  # bytes of a page that a phone still opens at once
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; every tag has to be closed by its own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def values(self, name: str) -> list[str]:
        return [a[name] for _, a in self.tags if a.get(name) is not None]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_the_page_needs_nothing_beside_it(rendered):
    page = Page(rendered[1])
    assert page.count("script") == 0 and page.count("iframe") == 0 and page.count("img") == 0
    for name in ("src", "href", "xlink:href", "data", "action"):
        for value in page.values(name):
            assert value.startswith(("#", "data:")), value
    style = rendered[1]
    assert "@import" not in style and not re.search(r"url\((?!#|&)", style)
    assert "default-src 'none'" in page.values("content")[1]
    assert len(rendered[1].encode()) < LARGEST


def test_names_are_unique_and_what_is_referred_to_is_there(rendered):
    page = Page(rendered[1])
    names = Counter(page.values("id"))
    assert [name for name, count in names.items() if count > 1] == []
    referred = [v[1:] for n in ("href", "xlink:href") for v in page.values(n) if v[0] == "#"]
    referred += re.findall(r"url\(#([^)]+)\)", rendered[1])
    referred += " ".join(page.values("aria-labelledby")).split()
    assert set(referred) <= set(names)


def test_every_plot_has_a_title_and_words_and_stands_at_two_widths(rendered):
    page = Page(rendered[1])
    plots = [a for tag, a in page.tags if tag == "svg"]
    assert len(plots) == 2 * len(PLOTS)
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in plots)
    assert page.count("desc") == page.count("title") - 1 == len(plots)
    assert "clip-advantages" in page.text and "dp 1 row 3 token 43" in page.text


def test_everything_that_a_report_owes_is_on_both(rendered):
    found, page, text = rendered
    for told in (Page(page).text, text.replace("\\", "")):
        for owed in (
            found.outputs[0],
            COPY,
            "8.441921404",
            "8.441922461",
            "1.25e-07",
            "folded",
            "every rank's batch (2 of 2)",
            "needs-teacher",
            "no column teacher_logprobs",
            "lost-one",
            "killed or still running",
            "Replay step 63 too.",
            "clip-rollout-log-ratio",
            "proven",
            "sign imbalance",
            "not looked for",
            "torch 2.13.0",
            "post-clip",
            "never a reference",
        ):
            assert owed in told, owed
        for one in real_results():
            assert one.experiment in told and f"{one.grad_norm_preclip:.6g}" in told


def test_a_verdict_is_a_word_with_a_sign_and_never_a_colour_alone(rendered):
    badges = re.findall(
        r'class="verdict \w+"><span aria-hidden="true">(.)</span> (\w+)<', rendered[1]
    )
    assert ("●", "pass") in badges and ("✕", "fail") in badges and ("▲", "partial") in badges
    assert len(re.findall('class="verdict', rendered[1])) == len(badges)


def test_text_of_others_stays_text(rendered):
    _, page, text = rendered
    assert HOSTILE in Page(page).text
    assert "<script" not in page and "onerror=" not in re.sub(r"&[#\w]+;", "", page).replace(
        "onerror=alert", ""
    )
    line = next(line for line in text.splitlines() if "alert(1)" in line)
    assert "&lt;script&gt;" in line and "\\[b\\]" in line and "\\*\\*d" in line


def test_names_of_experiments_in_plots_are_text_too(tmp_path):
    task = Task(JOB, tmp_path)
    name = "a</text><script>$\\frac{1}{0}$ & b"
    for one in real_results()[:2]:
        changed = one if one.is_baseline else one.model_copy(update={"experiment": name})
        ledger.append(task, "result", result=changed.as_json())
    page = render_page(facts(task))
    assert Page(page).count("script") == 0
    assert "a&lt;/text&gt;" in page


def test_equal_ledgers_give_equal_reports(rendered):
    found, page, text = rendered
    plots = shown(found)
    assert render_page(found, plots) == page and render_text(found, plots) == text


def test_an_empty_task_says_what_would_fill_it(tmp_path):
    task = Task(JOB, tmp_path)
    ledger.append(task, "observation", text="begun")
    found = facts(task)
    page, text = Page(render_page(found)), render_text(found)
    assert page.count("svg") == 0
    absent = [a for _, a in page.tags if a.get("class") == "absent"]
    assert len(absent) == 6
    for command in (
        f"spike-replay find {JOB}",
        f"spike-replay sweep SNAPSHOT --task {JOB}",
        f"spike-replay replay SNAPSHOT --task {JOB}",
        f"spike-replay analyze SNAPSHOT --task {JOB}",
    ):
        assert command in page.text
    assert "Nothing was replayed yet." in text
    assert f"    spike-replay replay SNAPSHOT --task {JOB}" in text


def test_missing_data_is_told_in_the_place_of_the_plot(tmp_path):
    task = Task(JOB, tmp_path)
    ledger.append(
        task, "preserved", snapshot="/a b/iter_0000085", preserved="/a b/kept/iter_0000085"
    )
    for one in real_results()[:3]:
        old = one.model_copy(update={"layer_norms": {}})
        ledger.append(task, "result", result=old.as_json())
    told = {one.name: one for one in shown(facts(task)) if one.plot is None}
    assert set(told) == {"history", "where", "change", "ratio", "balance"}
    assert told["balance"].command == f"spike-replay analyze '/a b/kept/iter_0000085' --task {JOB}"
    assert told["where"].command == f"spike-replay replay '/a b/kept/iter_0000085' --task {JOB}"


def test_non_finite_norms_break_no_plot(tmp_path):
    task = Task(JOB, tmp_path)
    for one in real_results()[:2]:
        wild = {"layer_norms": {k: float("nan") for k in one.layer_norms}}
        wild |= (
            {} if one.is_baseline else {"grad_norm_preclip": float("inf"), "ratio": float("inf")}
        )
        ledger.append(task, "result", result=one.model_copy(update=wild).as_json())
    page = Page(render_page(facts(task)))
    assert page.count("svg") > 0 and "inf" in page.text
