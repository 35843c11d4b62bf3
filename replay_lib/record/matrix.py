"""The matrix: what every method does to every case, from what is kept; nothing is replayed.

Verdicts and figures are those of the cases' baselines (:mod:`replay_lib.record.baselines`) in the
first environment that all cases have; where ``case.yaml`` expects another verdict, the cell says
so. Rendered as Markdown between two markers of a document, as the cards' results are.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from replay_lib.case import Case
from replay_lib.errors import CaseError, UsageError, fault
from replay_lib.expected import Expected
from replay_lib.noise import noise_of
from replay_lib.patch import Mitigation
from replay_lib.record.baselines import Document, Entry, files_in, read_document
from replay_lib.record.drift import FIGURES, signed_difference
from replay_lib.rule import Verdict

BASELINE = "baseline"
END = "<!-- end of matrix -->"
UPDATE = "Write them with pytest --update-baselines"
_BLOCK = re.compile(rf"<!-- matrix: (\w+)[^\n]*-->\n(.*?){re.escape(END)}", re.DOTALL)


@dataclass(frozen=True)
class Matrix:
    """Cases with their baselines in one environment, and those that they have in others.

    ``methods``: slug and family, the baseline first, then by family and slug.
    """

    cases: tuple[Case, ...]
    documents: tuple[Document, ...]  # one a case, all of one environment
    others: tuple[tuple[Document, ...], ...]  # of each case, in other environments
    methods: tuple[tuple[str, str], ...]


def read_matrix(cases: Sequence[Case], methods: Mapping[str, Mitigation]) -> Matrix:
    """The matrix of ``cases`` under ``methods``; CaseError where no environment has all of them."""
    found = [_documents(case) for case in cases]
    common = [slug for slug in found[0] if all(slug in own for own in found)] if found else []
    if not common:
        names = ", ".join(case.name for case in cases) or "no case"
        told = "no environment of which all have baselines"
        raise CaseError(fault(names, "baselines", told, "one at least", UPDATE))
    first = common[0]
    order = sorted((m for m in methods.values() if not m.needs), key=lambda m: (m.family, m.slug))
    return Matrix(
        cases=tuple(cases),
        documents=tuple(own[first] for own in found),
        others=tuple(tuple(d for slug, d in own.items() if slug != first) for own in found),
        methods=((BASELINE, "-"), *((m.slug, m.family) for m in order)),
    )


def _documents(case: Case) -> dict[str, Document]:
    files = files_in(case.file) if case.file else []
    read = (read_document(file) for file in files)
    return {
        document.environment.slug: document
        for document in read
        if document is not None and document.environment.dp_ranks is None  # else a diagnostic
    }


def verdict_of(case: Case, document: Document, method: str) -> str:
    """The kept verdict, beside what the case expects where that is another; ``-``: nothing kept."""
    entry = document.methods.get(method)
    if entry is None:
        return "-"
    unstated = Expected.one(Verdict.REPRODUCED if method == BASELINE else Verdict.PASS)
    expected = case.expected.get(method, unstated)
    told = "" if entry.verdict in expected.verdicts else f" (expected: {expected})"
    return f"{entry.verdict}{told}"


def verdicts(matrix: Matrix) -> str:
    """Methods down, cases across, verdicts in words; then how many there are of each."""
    table, counts = [], Counter[str]()
    for method, family in matrix.methods:
        cells = [
            verdict_of(*pair, method) for pair in zip(matrix.cases, matrix.documents, strict=True)
        ]
        counts.update(cells if method != BASELINE else ())
        table.append([method, family, *(f"**{c}**" if c == Verdict.PASS else c for c in cells)])
    told = ", ".join(f"{n} {word}" for word, n in counts.most_common())
    where = matrix.documents[0].environment.told()
    tried = f"{len(matrix.methods) - 1} methods on {len(matrix.cases)} cases ({where}): {told}."
    return f"{_table(matrix, table, 'family')}\n\n{tried}"


def figures(matrix: Matrix) -> str:
    """Ratios on the spikes, changes of the quiet controls, and what other environments give."""
    ratios = _cells(matrix, _ratio)
    quiet = _cells(matrix, _quiet)
    return (
        "Norm over median norm on the spike; after a stroke with carried old log-probabilities, "
        f"where a method changes the forward pass.\n\n{_table(matrix, ratios)}\n\n"
        "Change of the norm of the quiet control; after a stroke as above (`-`: the case has no "
        f"quiet control).\n\n{_table(matrix, quiet)}\n\n{environments(matrix)}"
    )


@dataclass(frozen=True)
class Beside:
    """One result in another environment; ``apart`` are its figures' signed relative differences."""

    environment: str
    case: str
    method: str
    here: Verdict
    there: Verdict
    apart: tuple[float, ...]  # the norm first
    band: float  # how far a norm may be apart by arithmetic alone, relative

    @property
    def explained(self) -> bool:
        """Whether both verdicts are of one norm, up to arithmetic."""
        return abs(self.apart[0]) <= self.band

    @property
    def largest(self) -> float:
        """Infinity where a figure cannot be compared: no maximum may pass over it."""
        return max(math.inf if math.isnan(off) else abs(off) for off in self.apart)


def beside(matrix: Matrix) -> list[Beside]:
    """Every result of another environment beside that of the first, by environment and case."""
    found = []
    for case, first, others in zip(matrix.cases, matrix.documents, matrix.others, strict=True):
        for other in others:
            for method in sorted(set(first.methods) & set(other.methods)):
                here, there = first.methods[method], other.methods[method]
                pairs = [(getattr(there, name), getattr(here, name)) for name in FIGURES]
                apart = (signed_difference(*p) for p in pairs if None not in p)
                told, verdicts = other.environment.told(), (here.verdict, there.verdict)
                band = noise_of(other.environment.precision, other.environment.device).relative
                found.append(Beside(told, case.name, method, *verdicts, tuple(apart), band))
    return sorted(found, key=lambda one: one.environment)


def environments(matrix: Matrix) -> str:
    """How far each other environment is from the first, and where its verdicts are others."""
    found = beside(matrix)
    if not found:
        return "No other environment has baselines."
    lines = []
    for name in dict.fromkeys(one.environment for one in found):
        own = [one for one in found if one.environment == name]
        lines.append([name, str(len(own)), f"{max(one.largest for one in own):.2g}"])
    table = tabulate(
        lines, ["environment", "results", "figures apart"], "github", disable_numparse=True
    )
    other = [one for one in found if one.here is not one.there]
    if not other:
        return f"{table}\n\nEvery verdict is the same there."
    heads = ["environment", "case", "method", "verdict above", "there", "norm", "noise band"]
    rows = [
        [o.environment, o.case, o.method, o.here, o.there, f"{o.apart[0]:+.2g}", f"{o.band:.0e}"]
        for o in other
    ]
    beyond = sum(not one.explained for one in other)
    told = (
        f"In {beyond} of these the norm is apart by more than the noise band."
        if beyond
        else "In each of these the norm is apart by less than the noise band: both verdicts are "
        "right where they are, and a case states both."
    )
    return f"{table}\n\n{tabulate(rows, heads, 'github', disable_numparse=True)}\n\n{told}"


BLOCKS: Mapping[str, Callable[[Matrix], str]] = {"verdicts": verdicts, "figures": figures}


def updated(text: str, matrix: Matrix, file: str | Path) -> str:
    """``text`` with every block of a matrix rendered anew; UsageError where it has none.

    A block starts with a line ``<!-- matrix: verdicts -->`` or ``<!-- matrix: figures -->`` (more
    words may follow the name) and ends with :data:`END`.
    """
    names = [match[1] for match in _BLOCK.finditer(text)]
    if not names or not set(names) <= set(BLOCKS):
        found = f"blocks {', '.join(names)}" if names else "no block"
        expected = f"<!-- matrix: {' or '.join(BLOCKS)} --> to {END}"
        raise UsageError(fault(file, "matrix", found, expected))

    def anew(match: re.Match[str]) -> str:
        head = match[0].partition("\n")[0]
        return f"{head}\n\n{BLOCKS[match[1]](matrix)}\n\n{END}"

    return _BLOCK.sub(anew, text)


def _cells(matrix: Matrix, cell: Callable[[Document, Entry], str]) -> list[list[str]]:
    return [
        [method, *(_cell(document, method, cell) for document in matrix.documents)]
        for method, _ in matrix.methods
    ]


def _cell(document: Document, method: str, cell: Callable[[Document, Entry], str]) -> str:
    entry = document.methods.get(method)
    return "-" if entry is None else cell(document, entry)


def _ratio(document: Document, entry: Entry) -> str:
    if entry.ratio is None:
        return "-"
    base = document.methods.get(BASELINE)
    if entry.carried is None or base is None or not base.ratio:
        return f"{entry.ratio:.3f}"
    return f"{entry.ratio:.3f} / {entry.carried / base.norm * base.ratio:.3f}"


def _quiet(document: Document, entry: Entry) -> str:
    base = document.methods.get(BASELINE)
    if entry.quiet is None or base is None or base.quiet is None:
        return "-"
    told = [q for q in (entry.quiet, entry.quiet_carried) if q is not None]
    return " / ".join(f"{signed_difference(q, base.quiet):+.1%}" for q in told)


def _table(matrix: Matrix, rows: Sequence[Sequence[str]], *more: str) -> str:
    heads = ["method", *more, *(case.name for case in matrix.cases)]
    return tabulate(rows, heads, "github", disable_numparse=True)
