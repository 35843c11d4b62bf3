"""Tables of results: one list of columns, rendered plain (logs, files) or in colour (terminal)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from replay_lib.record.result import Result
from replay_lib.rule import Verdict

if TYPE_CHECKING:
    from rich.table import Table

NOT_FULL = "not full-fidelity"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _experiment(result: Result) -> str:
    if result.against == "baseline":
        return result.experiment
    return f"{result.experiment} against {result.against}"


def _verdict(result: Result) -> str:
    others = [flag for flag in result.flags if str(flag) != str(result.verdict)]
    return f"{result.verdict} ({', '.join(others)})" if others else str(result.verdict)


def _expected(result: Result) -> str:
    if result.comparison == "as expected":
        return "as expected"
    return f"{result.comparison} than {result.wanted}"


def _fidelity(result: Result) -> str:
    return f"{result.fidelity}: {NOT_FULL}" if result.fidelity == "reduced" else result.fidelity


def _retained(result: Result) -> str:
    return "-" if result.retained is None else f"{result.retained.smallest:.0%}"


COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("case", lambda r: r.case),
    ("experiment", _experiment),
    ("grad norm", lambda r: _number(r.grad_norm_preclip, ".6g")),
    ("ratio", lambda r: _number(r.ratio, ".3f")),
    ("reduction", lambda r: "-" if r.is_baseline else _number(r.reduction, ".1%")),
    ("retained", _retained),
    ("verdict", _verdict),
    ("expected", _expected),
    ("fidelity", _fidelity),
)

_GREEN = (Verdict.REPRODUCED, Verdict.PASS)
_YELLOW = (Verdict.PARTIAL, Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE)


def plain_table(results: Sequence[Result], tablefmt: str = "simple") -> str:
    """The table as text; ``tablefmt`` is one of tabulate's ("github" for documents)."""
    rows = [[cell(result) for _, cell in COLUMNS] for result in results]
    headers = [title for title, _ in COLUMNS]
    # numbers stay as they were formatted: aligned text, nothing parsed again
    return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)


def rich_table(results: Sequence[Result], title: str | None = None) -> Table:
    """The same table for a terminal; a row that is worse than expected is red."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, header_style="bold")
    for name, _ in COLUMNS:
        table.add_column(name, overflow="fold")
    for result in results:
        cells = [Text(cell(result)) for _, cell in COLUMNS]
        table.add_row(*cells, style=_style(result))
    return table


def reproduction_table(results: Sequence[Result]) -> str:
    """Recorded against replayed norm, one line a case (its baseline)."""
    rows = [
        [
            r.case,
            _number(r.recorded_norm, ".10g"),
            _number(r.grad_norm_preclip, ".10g"),
            _number(r.relative_difference, ".2e"),
            _fidelity(r),
            r.dtype,
            r.device,
        ]
        for r in results
        if r.is_baseline
    ]
    headers = ["case", "recorded norm", "replayed norm", "relative difference"]
    return tabulate(rows, headers=[*headers, "fidelity", "dtype", "device"], disable_numparse=True)


def _style(result: Result) -> str:
    if result.red:
        return "red"
    if result.verdict in _GREEN:
        return "green"
    return "yellow" if result.verdict in _YELLOW else ""
