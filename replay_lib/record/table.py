"""Tables of results: one list of columns, rendered plain (logs, files) or in colour (terminal)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tabulate import tabulate

from replay_lib.record.result import Result
from replay_lib.rule import Verdict

if TYPE_CHECKING:
    from rich.table import Table

NOT_FULL = "not full-fidelity"
USUAL_REPEATS = 2  # the least number that shows whether replays repeat
#: A case's table stays under 120 columns: the longest built-in slug and the longest verdict fit
#: beside the numbers, what is longer (flags) is folded.
WIDEST = {"experiment": 39, "verdict": 17}


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _experiment(result: Result) -> str:
    if result.against == "baseline":
        return result.experiment
    return f"{result.experiment} against {result.against}"


def _flags(result: Result) -> list[str]:
    return [str(flag) for flag in result.flags if str(flag) != str(result.verdict)]


def _with_remarks(result: Result, remarks: Sequence[str]) -> str:
    return f"{result.verdict} ({', '.join(remarks)})" if remarks else str(result.verdict)


def _verdict(result: Result) -> str:
    return _with_remarks(result, _flags(result))


def _verdict_and_comparison(result: Result) -> str:
    unexpected = [] if result.comparison == "as expected" else [result.comparison]
    return _with_remarks(result, _flags(result) + unexpected)


def _expected(result: Result) -> str:
    if result.comparison == "as expected":
        return "as expected"
    return f"{result.comparison} than {result.told_wanted}"


def _fidelity(result: Result) -> str:
    return f"{result.fidelity}: {NOT_FULL}" if result.fidelity == "reduced" else result.fidelity


def _carried(result: Result) -> str:
    ratio = next((one.ratio for one in result.old if one.old == "carried"), None)
    return _number(ratio, ".3f")


def _reduction(result: Result) -> str:
    """That of the treatment of old log-probabilities which counted."""
    if result.is_baseline:
        return "-"
    return _number(result.old[0].reduction if result.old else result.reduction, ".1%")


def _retained(result: Result) -> str:
    """The smallest share under any treatment of old log-probabilities: it may be what counted."""
    kept = [one for one in (result.retained, *(o.retained for o in result.old)) if one is not None]
    return f"{min(one.smallest for one in kept):.0%}" if kept else "-"


def _quiet_change(result: Result) -> str:
    """The larger one of both changes of the quiet control's norm."""
    if result.side_effect is None:
        return "-"
    if result.side_effect.red:
        return "RED"
    return "-" if result.is_baseline else _number(result.side_effect.largest_change, "+.1%")


def _quiet_cosine(result: Result) -> str:
    """The smaller one of both cosines on the quiet control."""
    if result.side_effect is None or result.side_effect.red or result.is_baseline:
        return "-"
    return _number(result.side_effect.smallest_cosine, ".3f")


def _quiet(result: Result) -> str:
    """Both in one narrow cell, of the change two digits."""
    change, cosine = _quiet_change(result), _quiet_cosine(result)
    if change in ("-", "RED"):
        return change
    effect = result.side_effect
    assert effect is not None and effect.largest_change is not None
    short = change if abs(effect.largest_change) < 0.1 else f"{effect.largest_change:+.0%}"
    return f"{short} {cosine}"


def _cosine(result: Result) -> str:
    """The smaller one of both cosines to the unpatched gradient."""
    known = [c for c in (result.cosine, result.cosine_carried) if c is not None]
    return _number(min(known, default=None), ".3f")


Columns = tuple[tuple[str, Callable[[Result], str]], ...]

_FIGURES: Columns = (
    ("grad norm", lambda r: _number(r.grad_norm_preclip, ".6g")),
    ("ratio", lambda r: _number(r.ratio, ".3f")),
    ("carried", _carried),
    ("reduction", _reduction),
    ("retained", _retained),
)
#: One table for all cases, for documents.
COLUMNS: Columns = (
    ("case", lambda r: r.case),
    ("experiment", _experiment),
    *_FIGURES,
    ("cosine", _cosine),
    ("quiet", _quiet_change),
    ("quiet cosine", _quiet_cosine),
    ("verdict", _verdict),
    ("expected", _expected),
    ("fidelity", _fidelity),
)
#: One table a case, under a line that names it; what a reason tells (the cosine) is left out.
CASE_COLUMNS: Columns = (
    ("experiment", _experiment),
    *_FIGURES,
    ("quiet", _quiet),
    ("verdict", _verdict_and_comparison),
)

_GREEN = (Verdict.REPRODUCED, Verdict.PASS)
_YELLOW = (Verdict.PARTIAL, Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE)


def case_line(result: Result) -> str:
    """What the results of one case in one session have in common.

    Baselines are counted where there were more than the usual two, or where they differ.
    """
    line = f"{result.case}: {_fidelity(result)}, {result.dtype} on {result.device}"
    if result.repeats is None or (result.repeats == USUAL_REPEATS and result.repeat_spread == 0):
        return line
    spread = _number(result.repeat_spread, ".1e") if result.repeat_spread else "0"
    return f"{line}; {result.repeats} baselines, spread of their norm {spread}"


def by_case(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Neighbouring results that have their :func:`case_line` in common."""
    return ((line, list(group)) for line, group in groupby(results, case_line))


def document_table(results: Sequence[Result]) -> str:
    """One table for all cases, in Markdown."""
    headers, *rows = _cells(results, COLUMNS)
    # numbers stay as they were formatted: aligned text, nothing parsed again
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def plain_tables(results: Sequence[Result]) -> str:
    """A line and a table a case as text, under 120 columns wide."""
    return "\n\n".join(f"{line}\n{_plain(group)}" for line, group in by_case(results))


def _plain(results: Sequence[Result]) -> str:
    cells = _cells(results, CASE_COLUMNS)
    return _narrow(
        [[_fold(title, text) for title, text in zip(cells[0], row, strict=True)] for row in cells]
    )


def _narrow(rows: Sequence[Sequence[str]]) -> str:
    """Text with the first of ``rows`` as titles; tabulate would make them two columns wider."""
    lines = tabulate(rows, tablefmt="simple", disable_numparse=True).splitlines()
    return "\n".join([lines[1], lines[0], *lines[2:-1]])


def _cells(results: Sequence[Result], columns: Columns) -> list[list[str]]:
    titles = [title for title, _ in columns]
    return [titles, *([cell(result) for _, cell in columns] for result in results)]


def _fold(title: str, text: str) -> str:
    width = WIDEST.get(title)
    return text if width is None else "\n".join(textwrap.wrap(text, width))


def rich_table(results: Sequence[Result], title: str | None = None) -> Table:
    """The table of one case for a terminal; a row that is worse than expected is red."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name, _ in CASE_COLUMNS:
        table.add_column(name, overflow="fold", max_width=WIDEST.get(name))
    for result in results:
        cells = [Text(cell(result)) for _, cell in CASE_COLUMNS]
        table.add_row(*cells, style=_style(result))
    return table


def reproduction_table(results: Sequence[Result]) -> str:
    """Recorded against replayed norm, one line a case (its baseline)."""
    rows = [reproduction_cells(r) for r in results if r.is_baseline]
    titles = ["case", "recorded norm", "replayed norm", "relative difference"]
    return _narrow([[*titles, "fidelity", "dtype", "device"], *rows])


def reproduction_cells(result: Result) -> list[str]:
    """Case, recorded and replayed norm, their relative difference, fidelity, dtype, device."""
    return [
        result.case,
        _number(result.recorded_norm, ".10g"),
        _number(result.grad_norm_preclip, ".10g"),
        _number(result.relative_difference, ".2e"),
        _fidelity(result),
        result.dtype,
        result.device,
    ]


def attempt_cells(result: Result) -> list[str]:
    """Case, experiment, grad norm, ratio, reduction, verdict with its flags."""
    cells = dict(COLUMNS)
    titles = ("case", "experiment", "grad norm", "ratio", "reduction")
    full = [] if result.fidelity != "reduced" else [NOT_FULL]
    return [*(cells[t](result) for t in titles), _with_remarks(result, _flags(result) + full)]


def _style(result: Result) -> str:
    if result.red or result.quiet_fault:
        return "red"
    if result.verdict in _GREEN:
        return "green"
    return "yellow" if result.verdict in _YELLOW else ""
