"""``spike-replay matrix``: every method on every case, from baselines; nothing is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from replay_lib.case import builtin_cases, discover
from replay_lib.cli.arguments import Json, Mitigations, as_path
from replay_lib.cli.output import print_json, stdout
from replay_lib.errors import UsageError, fault
from replay_lib.methods import load_methods
from replay_lib.record.matrix import Matrix, figures, read_matrix, updated, verdict_of, verdicts
from replay_lib.writing import replace_file


def matrix(
    cases: Annotated[
        Path | None,
        typer.Argument(parser=as_path, help="A directory of cases; none given: those embedded."),
    ] = None,
    *,
    write: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            parser=as_path,
            help="Render into FILE, between its markers, and print no table; may be repeated.",
        ),
    ] = None,
    mitigations: Mitigations = None,
    json: Json = False,
) -> None:
    """Show verdicts and figures of all methods on all CASES as their baselines have them.

    Markdown tables. FILE of --write holds lines as <!-- matrix: verdicts --> or <!-- matrix:
    figures -->, and <!-- end of matrix -->; what is between them is replaced.
    """
    found = read_matrix(discover(cases or builtin_cases()), load_methods(mitigations))
    changed = {str(file): _render(file, found) for file in write or ()}
    if json:
        print_json(_document(found) | ({"written": changed} if write else {}))
    elif write:
        for file, is_new in changed.items():
            stdout().print(f"{file}: {'written' if is_new else 'up to date'}", markup=False)
    else:
        text = f"{verdicts(found)}\n\n{figures(found)}"
        stdout().print(text, markup=False, soft_wrap=True, highlight=False)


def _render(file: Path, found: Matrix) -> bool:
    """Whether ``file`` changed."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(fault(file, None, str(error), "a text to write into")) from error
    new = updated(text, found, file)
    if new != text:
        replace_file(file, new.encode("utf-8"))
    return new != text


def _document(found: Matrix) -> dict[str, Any]:
    pairs = list(zip(found.cases, found.documents, strict=True))
    return {
        "environment": found.documents[0].environment.slug,
        "cases": [case.name for case in found.cases],
        "methods": {
            method: {case.name: verdict_of(case, document, method) for case, document in pairs}
            for method, _ in found.methods
        },
    }
