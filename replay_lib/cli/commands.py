"""Commands of ``spike-replay``. What they do is in the rooms below; here is how it is asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from replay_lib import __version__
from replay_lib.case import Case
from replay_lib.cli.analyze import analyze
from replay_lib.cli.arguments import (
    METHOD_SYNTAX,
    Against,
    Backend,
    Deterministic,
    Device,
    DpRanks,
    JoinTimeout,
    Json,
    Layout,
    Mitigations,
    Nnodes,
    Precision,
    RdzvEndpoint,
    Repeats,
    ResultsFile,
    Rows,
    TaskName,
    Trainer,
)
from replay_lib.cli.arguments import as_path as _path
from replay_lib.cli.combine import check_combine, combine_methods
from replay_lib.cli.doctor import doctor
from replay_lib.cli.find import find_command
from replay_lib.cli.guard import guard
from replay_lib.cli.join import join
from replay_lib.cli.keeping import Call, keeping
from replay_lib.cli.matrix import matrix
from replay_lib.cli.merge import merge
from replay_lib.cli.output import (
    error_document,
    key_value_table,
    print_error,
    print_json,
    progress,
    stdout,
)
from replay_lib.cli.pin import pin
from replay_lib.cli.porting import export, import_
from replay_lib.cli.preserve import preserve_command
from replay_lib.cli.report import report
from replay_lib.cli.task import task as task_commands
from replay_lib.cli.views import methods_table, print_replayed, replayed_document, snapshot_values
from replay_lib.cli.zoo import zoo
from replay_lib.demo import RESULTS, run_demo
from replay_lib.engine.nodes import JOIN_TIMEOUT_S, Nodes
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import SpikeReplayError, UsageError
from replay_lib.exit_codes import ExitCode
from replay_lib.expectations import check_expected
from replay_lib.listing import describe_methods, describe_snapshot
from replay_lib.methods import callable_alone, left_out, load_methods
from replay_lib.record.results_file import append_results, check_results_file, read_results
from replay_lib.run import (
    LEAST_REPEATS,
    Replayed,
    ReplayOptions,
    parse_experiments,
    replay_case,
)

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
app.command("export")(export)
app.command("import")(import_)


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


@app.command(epilog=METHOD_SYNTAX)
def replay(
    context: typer.Context,
    case: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT_OR_CASE", parser=_path, help="A snapshot or a case directory."
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="A method to try; may be repeated. None: baseline."),
    ] = None,
    *,
    against: Against = "baseline",
    device: Device = "auto",
    precision: Precision = "recorded",
    dp_ranks: DpRanks = None,
    layout: Layout = "auto",
    nnodes: Nnodes = 1,
    rdzv_endpoint: RdzvEndpoint = None,
    join_timeout: JoinTimeout = JOIN_TIMEOUT_S,
    rows: Rows = "recorded",
    deterministic: Deterministic = True,
    mitigations: Mitigations = None,
    trainer: Trainer = None,
    repeats: Repeats = LEAST_REPEATS,
    backend: Backend = "native",
    results: ResultsFile = None,
    task: TaskName = None,
    json: Json = False,
) -> None:
    """Replay a recorded step, as it was and under each METHOD, and judge the results."""
    call = Call(context, task, case)
    options = _options(
        device,
        precision=precision,
        dp_ranks=dp_ranks,
        layout=layout,
        nodes=Nodes.of(nnodes, rdzv_endpoint, join_timeout),
        rows=rows,
        deterministic=deterministic,
        mitigations=mitigations,
        trainer=trainer,
        repeats=repeats,
        backend=backend,
    )
    _replay(call, method or [], against, options, results=results, json=json)


@app.command(epilog=METHOD_SYNTAX)
def sweep(
    context: typer.Context,
    case: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT_OR_CASE", parser=_path, help="A snapshot or a case directory."
        ),
    ],
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods to try; none given: all registered ones.")
    ] = None,
    *,
    combine: Annotated[
        int | None,
        typer.Option(metavar="2", help="Then try pairs of what helped, the cheapest first."),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --combine: experiments in all [default: 60]."),
    ] = None,
    against: Against = "baseline",
    device: Device = "auto",
    precision: Precision = "recorded",
    dp_ranks: DpRanks = None,
    layout: Layout = "auto",
    nnodes: Nnodes = 1,
    rdzv_endpoint: RdzvEndpoint = None,
    join_timeout: JoinTimeout = JOIN_TIMEOUT_S,
    rows: Rows = "recorded",
    deterministic: Deterministic = True,
    mitigations: Mitigations = None,
    trainer: Trainer = None,
    repeats: Repeats = LEAST_REPEATS,
    backend: Backend = "native",
    results: ResultsFile = None,
    task: TaskName = None,
    json: Json = False,
) -> None:
    """Try many methods on one case, in one session."""
    call = Call(context, task, case)
    limit = check_combine(combine, budget)
    options = _options(
        device,
        precision=precision,
        dp_ranks=dp_ranks,
        layout=layout,
        nodes=Nodes.of(nnodes, rdzv_endpoint, join_timeout),
        rows=rows,
        deterministic=deterministic,
        mitigations=mitigations,
        trainer=trainer,
        repeats=repeats,
        backend=backend,
    )
    known = load_methods(options.mitigations)
    notice = "" if methods or json else left_out(known)
    chosen = methods or callable_alone(known)
    if limit is None:
        _replay(call, chosen, against, options, results=results, json=json, notice=notice)
    with keeping(call, chosen) as kept:
        opened, experiments = _checked(case, chosen, against, options, results)
        kept.exit_code = combine_methods(
            opened, experiments, options, budget=limit, results=results, json=json, kept=kept
        )
        if notice:
            stdout().print(notice, markup=False)
    raise typer.Exit(kept.status)


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


def _options(
    device: str,
    *,
    precision: str,
    dp_ranks: str | None,
    layout: str,
    nodes: Nodes | None,
    rows: str,
    deterministic: bool,
    mitigations: list[Path] | None,
    trainer: str | None,
    repeats: int,
    backend: str,
) -> ReplayOptions:
    return ReplayOptions(
        device=device,
        precision=precision,
        dp_ranks=_numbers(dp_ranks),
        layout=layout,
        nodes=nodes,
        rows=rows,
        deterministic=deterministic,
        mitigations=tuple(mitigations or ()),
        trainer=trainer,
        repeats=repeats,
        backend=backend,
    )


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--dp-ranks: found {text!r}, expected numbers as in 0,1") from error


def _replay(
    call: Call,
    texts: list[str],
    against: str,
    options: ReplayOptions,
    *,
    results: Path | None,
    json: bool,
    notice: str = "",
) -> NoReturn:
    started = time.monotonic()
    with keeping(call, texts) as kept:
        opened, experiments = _checked(call.path, texts, against, options, results)
        with progress() as tell:
            replayed: Replayed = replay_case(opened, experiments, options, tell, keep=kept.keep)
        lost = _not_kept(results, replayed)
        seconds = time.monotonic() - started
        if json:
            error = error_document(lost or kept.retry())
            print_json(replayed_document(replayed, seconds) | error)
        else:
            print_replayed(replayed, stdout())
            if notice:
                stdout().print(notice, markup=False)
            if lost:
                print_error(lost.code, str(lost), as_json=False)
        kept.exit_code = lost.exit_code if lost else replayed.exit_code
    raise typer.Exit(kept.status)


def _checked(
    path: Path, texts: list[str], against: str, options: ReplayOptions, results: Path | None
) -> tuple[Case, list[Experiment]]:
    """Case and experiments; what is wrong with an argument is told before anything is started."""
    known = load_methods(options.mitigations)
    empty = [text for text in texts if not text.strip()]
    if empty:
        raise UsageError("a method without a name was given; leave it out for the baseline alone")
    parse_experiments([against], "baseline", known)
    experiments = parse_experiments(texts, against, known)
    opened = Case.open(path)
    check_expected(opened, known)
    if results is not None:
        check_results_file(results)
    return opened, experiments


def _not_kept(results: Path | None, replayed: Replayed) -> SpikeReplayError | None:
    """Why the results could not be kept (the disk is full by now): they are shown all the same."""
    try:
        if results is not None:
            append_results(results, replayed.results)
    except SpikeReplayError as error:
        return error
    return None
