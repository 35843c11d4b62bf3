"""``spike-replay guard``: which recorded steps a change of the trainer brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from replay_lib.case import Case, builtin_cases, discover
from replay_lib.cli.arguments import Device, Json, Layout, Mitigations, Repeats, TaskName, as_path
from replay_lib.cli.keeping import Keeps, keeping_cases
from replay_lib.cli.output import error_document, print_json, progress, stdout
from replay_lib.cli.remote import RemoteDir, RemotePython, Ssh, guard_at, place_of
from replay_lib.errors import UsageError
from replay_lib.guard.guarding import Guarded
from replay_lib.guard.reference import reference_of
from replay_lib.guard.report import counted, documents, lines, write_reports
from replay_lib.layout import CASE_FILE
from replay_lib.record.results_file import append_results, check_results_file
from replay_lib.run import LEAST_REPEATS, ReplayOptions


def _file(name: str, told: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, metavar="FILE", parser=as_path, help=told)
    return option


def guard(
    context: typer.Context,
    cases: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=as_path, help="Cases or directories of cases; none given: the embedded ones."
        ),
    ] = None,
    *,
    trainer: Annotated[
        str, typer.Option(metavar="NAME", help="Under test: axrl, grpo or module:factory.")
    ],
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME|REVISION",
            help="The reference: another trainer, or the git revision of module:factory.",
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="Methods to try; none: those a case expects."),
    ] = None,
    fail_on: Annotated[
        Literal["worse", "changed"],
        typer.Option(help="What makes the exit status 1: what became worse, or every change."),
    ] = "worse",
    device: Device = "auto",
    layout: Layout = "auto",
    mitigations: Mitigations = None,
    repeats: Repeats = LEAST_REPEATS,
    results: Annotated[
        Path | None, _file("--results", "Append the tested results to FILE.")
    ] = None,
    junit: Annotated[Path | None, _file("--junit", "Write JUnit XML to FILE.")] = None,
    json_lines: Annotated[
        Path | None, _file("--json-lines", "Write one JSON document an experiment to FILE.")
    ] = None,
    summary: Annotated[
        Path | None, _file("--summary", "Write a Markdown summary to FILE, for a pull request.")
    ] = None,
    ssh: Ssh = None,
    remote_python: RemotePython = None,
    remote_dir: RemoteDir = None,
    task: TaskName = None,
    json: Json = False,
) -> None:
    """Replay CASES with a trainer and with a reference, and tell only what changed."""
    place = place_of(ssh, remote_python, remote_dir)
    options = ReplayOptions(
        device=device,
        layout=layout,
        mitigations=tuple(mitigations or ()),
        trainer=trainer,
        repeats=repeats,
    )
    chosen = _cases(cases or [builtin_cases()])
    for file in filter(None, (junit, json_lines, summary)):
        check_results_file(file, append=False)
    if results is not None:
        check_results_file(results)
    asked = [(case, method or list(case.expected)) for case in chosen]
    with keeping_cases(context, task, asked) as kept:
        with reference_of(against, trainer) as reference, progress() as tell:
            guarded = guard_at(
                place,
                kept.by_case.values(),
                chosen,
                method or [],
                options,
                reference=reference,
                tell=tell,
                keep=kept.keep,
            )
        if results is not None:
            append_results(results, guarded.results)
        write_reports(guarded, junit_file=junit, json_lines=json_lines, summary=summary)
        _show(guarded, kept, as_json=json)
        code = guarded.exit_code(fail_on)
        kept.end(code)
    raise typer.Exit(kept.status(code))


def _show(guarded: Guarded, kept: Keeps, *, as_json: bool) -> None:
    if as_json:
        told = {
            "told": counted(guarded),
            "faults": guarded.faults,
            "experiments": documents(guarded),
        }
        print_json(told | error_document(kept.retry()))
        return
    for line in lines(guarded):
        stdout().print(line, soft_wrap=True)


def _cases(paths: list[Path]) -> list[Case]:
    """Cases given one by one, or directories of them."""
    found: list[Case] = []
    for path in paths:
        single = (path / CASE_FILE).exists() or path.is_file() or not path.is_dir()
        inside = [] if single else discover(path)
        found += inside or [Case.open(path)]
    twice = {c.name for c in found if sum(c.name == other.name for other in found) > 1}
    if twice:
        raise UsageError(f"guard: found two cases called {', '.join(sorted(twice))}")
    return found
