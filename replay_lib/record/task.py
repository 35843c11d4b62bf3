"""A task: one job whose spikes somebody works on, and the files that are kept about it.

agent-task/spike-replay/<job>.jsonl         the ledger: what was done, append-only
agent-task/spike-replay/<job>.md            the task file, rendered from it
agent-task/spike-replay/<job>.report.html   the report, as a page
agent-task/spike-replay/<job>.report.md     and as text
tmp/spike-replay/<job>/<timestamp>/         what a command printed and wrote
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from replay_lib import layout
from replay_lib.errors import UsageError

_JOB = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}$")


@dataclass(frozen=True)
class Task:
    """``job`` is a job's name; ``root`` the directory that holds the task's files.

    UsageError for a name that could not be that of a file.
    """

    job: str
    root: Path = Path()

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job):
            raise UsageError(
                f"task {self.job!r:.80}: expected a job's name, of letters, digits and . _ + = @ -"
            )

    @property
    def ledger(self) -> Path:
        """The ledger; absent until something was done."""
        return self.root / layout.TASKS / f"{self.job}.jsonl"

    @property
    def file(self) -> Path:
        """The task file in Markdown."""
        return self.root / layout.TASKS / f"{self.job}.md"

    @property
    def page(self) -> Path:
        """The report as one HTML page."""
        return self.root / layout.TASKS / f"{self.job}.report.html"

    @property
    def report(self) -> Path:
        """The report in Markdown."""
        return self.root / layout.TASKS / f"{self.job}.report.md"

    def output(self, at: datetime | None = None) -> Path:
        """A new directory for the output of one command, named by the time (UTC); created."""
        stamp = (at or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
        above = self.root / layout.OUTPUT / self.job
        above.mkdir(parents=True, exist_ok=True)
        for number in range(1000):
            place = above / (stamp if number == 0 else f"{stamp}-{number}")
            try:
                place.mkdir()
            except FileExistsError:
                continue  # another command began in the same second
            return place
        raise UsageError(f"{above / stamp}: a thousand commands in one second")
