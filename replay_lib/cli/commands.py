"""Commands of ``spike-replay``. What they do is in the rooms below; here is how it is asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from replay_lib import __version__
from replay_lib.cli.analyze import analyze
from replay_lib.cli.arguments import METHOD_SYNTAX, Device, Json, Mitigations
from replay_lib.cli.arguments import as_path as _path
from replay_lib.cli.doctor import doctor
from replay_lib.cli.find import find_command
from replay_lib.cli.guard import guard
from replay_lib.cli.import_dump import import_dump
from replay_lib.cli.join import join
from replay_lib.cli.matrix import matrix
from replay_lib.cli.merge import merge
from replay_lib.cli.output import key_value_table, print_json, progress, stdout
from replay_lib.cli.pin import pin
from replay_lib.cli.porting import export, import_
from replay_lib.cli.preserve import preserve_command
from replay_lib.cli.record_method import record_method_command
from replay_lib.cli.release import release_command
from replay_lib.cli.replays import replay, sweep
from replay_lib.cli.report import report
from replay_lib.cli.task import task as task_commands
from replay_lib.cli.views import methods_table, print_replayed, replayed_document, snapshot_values
from replay_lib.cli.zoo import zoo
from replay_lib.demo import RESULTS, run_demo
from replay_lib.exit_codes import ExitCode
from replay_lib.listing import describe_methods, describe_snapshot
from replay_lib.methods import load_methods
from replay_lib.record.results_file import read_results
from replay_lib.run import ReplayOptions

# \b keeps the lines of a paragraph as they are
EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {c.value:>3}  {c.meaning}" for c in ExitCode)

app = typer.Typer(
    name="spike-replay",
    help="Replay recorded gradient spikes, try mitigations on them, and judge what they do.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(zoo, name="zoo")
app.add_typer(task_commands, name="task")
for command in (analyze, doctor, pin, guard, join, merge, matrix, report):
    app.command()(command)
app.command("find")(find_command)
app.command("preserve")(preserve_command)
for replaying in (replay, sweep):
    app.command(epilog=METHOD_SYNTAX)(replaying)
app.command("release")(release_command)
app.command("record-method")(record_method_command)
app.command("export")(export)
app.command("import")(import_)
app.command("import-dump")(import_dump)


@app.command()
def show(
    snapshot: Annotated[
        Path, typer.Argument(parser=_path, help="A snapshot (iter_*) or a case directory.")
    ],
    json: Json = False,
) -> None:
    """Tell what a snapshot holds: step, norms, ratio, layout, settings, files."""
    described = describe_snapshot(snapshot)
    if json:
        print_json(described)
    else:
        stdout().print(key_value_table(snapshot_values(described)))


@app.command()
def methods(
    mitigations: Mitigations = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="FILE",
            parser=_path,
            help=f"Results that tell a status [default: {RESULTS}].",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List all registered methods with family, seams and status."""
    known = load_methods(mitigations)
    file = results or (RESULTS if RESULTS.is_file() else None)
    told = read_results(file) if file else []
    described = describe_methods(known, told)
    if json:
        source = {"file": str(file) if file else None, "count": len(told)}
        print_json({"methods": described, "results": source})
        return
    stdout().print(methods_table(described))
    stdout().print(
        f"status: the best of {len(told)} results in {file}"
        if file
        else f"status: no result is known; {RESULTS} is not there. Name a file with --results FILE",
        soft_wrap=True,
    )


@app.command()
def demo(
    device: Device = "auto",
    results: Annotated[
        Path, typer.Option(metavar="FILE", parser=_path, help="Where results go.")
    ] = RESULTS,
    json: Json = False,
) -> None:
    """Replay the embedded spikes under the five recorded methods and show the verdicts."""
    started = time.monotonic()
    with progress() as tell:
        replayed = run_demo(ReplayOptions(device=device), results, tell)
    seconds = time.monotonic() - started
    if json:
        print_json(replayed_document(replayed, seconds) | {"file": str(results)})
    else:
        print_replayed(replayed, stdout())
        stdout().print(f"\nResults: {results}. It took {seconds:.1f} s.", markup=False)
    raise typer.Exit(replayed.exit_code)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Replay recorded gradient spikes, try mitigations on them, and judge what they do."""
    if version:
        stdout().print(__version__)
        raise typer.Exit
