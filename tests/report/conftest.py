"""One whole report, drawn once for all tests that only look at it."""

from __future__ import annotations

import pytest

from replay_lib.report.facts import Facts
from replay_lib.report.page import render_page
from replay_lib.report.plots import shown
from replay_lib.report.text import render_text
from tests.report.make_task import PLOTS, facts, full_task


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> tuple[Facts, str, str]:
    """Facts of a whole task, its page and its text."""
    found = facts(full_task(tmp_path_factory.mktemp("task")))
    plots = shown(found)
    assert [one.name for one in plots if one.plot] == PLOTS
    return found, render_page(found, plots), render_text(found, plots)
