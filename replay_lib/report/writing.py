"""Write a task's report, page and text, and say so in its ledger."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from replay_lib.errors import UsageError, did_you_mean, fault
from replay_lib.record import ledger
from replay_lib.record.task import Task
from replay_lib.report.facts import Facts, facts_of
from replay_lib.report.page import render_page
from replay_lib.report.plots import Shown, shown
from replay_lib.report.text import render_text
from replay_lib.writing import replace_file


@dataclass(frozen=True)
class Written:
    """What was written: both files, the page's sha256, and what it was rendered from."""

    page: Path
    text: Path
    sha256: str
    facts: Facts
    plots: tuple[Shown, ...]


def write_report(task: Task) -> Written:
    """Render ``task``'s ledger into its page and its text, each replaced whole, and append
    ``reported``.

    UsageError where the task has no ledger, its ledger cannot be read, or a file not be written.
    """
    events = ledger.read(task)
    if not events:
        raise UsageError(_no_ledger(task))
    facts = facts_of(task.job, task.ledger, events)
    plots = tuple(shown(facts))
    page = render_page(facts, plots).encode("utf-8")
    text = render_text(facts, plots).encode("utf-8")
    for file, content in ((task.report, text), (task.page, page)):
        try:
            replace_file(file, content)
        except OSError as error:
            told = error.strerror or str(error)
            raise UsageError(fault(file, None, repr(told), "a file that can be written")) from error
    sha256 = hashlib.sha256(page).hexdigest()
    ledger.append(task, "reported", page=str(task.page), report=str(task.report), sha256=sha256)
    return Written(task.page, task.report, sha256, facts, plots)


def _no_ledger(task: Task) -> str:
    known = [one.job for one in ledger.tasks(task.root)]
    near = did_you_mean(task.job, known)
    listed = f"tasks here: {', '.join(known) or 'none'}"
    then = near or listed
    expected = "a task that something was done for"
    return fault(task.ledger, None, "no event", expected, f"{then[0].upper()}{then[1:]}")
