"""How far a command came that moves bytes: a bar on stderr, or a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from replay_lib.cli.output import stderr
from replay_lib.cli.units import printable, size_text

TellBytes = Callable[[int, int, str], None]
LINE_EVERY_SECONDS = 10.0


@contextlib.contextmanager
def bytes_bar(what: str) -> Iterator[TellBytes]:
    """A function that takes bytes done, bytes in all and a file's name, and shows them."""
    console = stderr()
    if not console.is_terminal:
        yield _lines(what)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def tell(done: int, total: int, _name: str) -> None:
            bar.update(task, completed=done, total=total)

        yield tell


def _lines(what: str) -> TellBytes:
    """One line every ten seconds: a copy that takes less says nothing."""
    told = [time.monotonic()]

    def tell(done: int, total: int, name: str) -> None:
        if time.monotonic() - told[0] >= LINE_EVERY_SECONDS:
            told[0] = time.monotonic()
            line = f"{what}: {size_text(done)} of {size_text(total)} {name}"
            stderr().print(printable(line), soft_wrap=True)

    return tell
