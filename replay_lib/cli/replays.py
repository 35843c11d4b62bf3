"""``spike-replay replay`` and ``sweep``: one case under methods, in one session."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from replay_lib.case import Case
from replay_lib.cli.arguments import (
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
from replay_lib.cli.keeping import Call, keeping
from replay_lib.cli.output import (
    error_document,
    print_error,
    print_json,
    progress,
    stdout,
)
from replay_lib.cli.remote import RemoteDir, RemotePython, Ssh, place_of, replay_at
from replay_lib.cli.views import print_replayed, replayed_document
from replay_lib.engine.layout import read_ranks
from replay_lib.engine.nodes import JOIN_TIMEOUT_S, Nodes
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import SpikeReplayError, UsageError
from replay_lib.expectations import check_expected
from replay_lib.methods import callable_alone, left_out, load_methods
from replay_lib.record.results_file import append_results, check_results_file
from replay_lib.remote.replaying import Remote
from replay_lib.run import (
    LEAST_REPEATS,
    Replayed,
    ReplayOptions,
    parse_experiments,
)


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
    ssh: Ssh = None,
    remote_python: RemotePython = None,
    remote_dir: RemoteDir = None,
    task: TaskName = None,
    json: Json = False,
) -> None:
    """Replay a recorded step, as it was and under each METHOD, and judge the results."""
    call = Call(context, task, case)
    place = place_of(ssh, remote_python, remote_dir)
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
    _replay(call, method or [], against, options, place=place, results=results, json=json)


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
    ssh: Ssh = None,
    remote_python: RemotePython = None,
    remote_dir: RemoteDir = None,
    task: TaskName = None,
    json: Json = False,
) -> None:
    """Try many methods on one case, in one session."""
    call = Call(context, task, case)
    place = place_of(ssh, remote_python, remote_dir)
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
        _replay(
            call,
            chosen,
            against,
            options,
            place=place,
            results=results,
            json=json,
            notice=notice,
        )
    with keeping(call, chosen) as kept:
        opened, experiments = _checked(case, chosen, against, options, results)
        kept.exit_code = combine_methods(
            opened,
            experiments,
            options,
            place=place,
            budget=limit,
            results=results,
            json=json,
            kept=kept,
        )
        if notice:
            stdout().print(notice, markup=False)
    raise typer.Exit(kept.status)


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
        dp_ranks=read_ranks(dp_ranks),
        layout=layout,
        nodes=nodes,
        rows=rows,
        deterministic=deterministic,
        mitigations=tuple(mitigations or ()),
        trainer=trainer,
        repeats=repeats,
        backend=backend,
    )


def _replay(
    call: Call,
    texts: list[str],
    against: str,
    options: ReplayOptions,
    *,
    place: Remote | None,
    results: Path | None,
    json: bool,
    notice: str = "",
) -> NoReturn:
    started = time.monotonic()
    with keeping(call, texts) as kept:
        opened, experiments = _checked(call.path, texts, against, options, results)
        with progress() as tell:
            replayed = replay_at(place, kept, opened, experiments, options, tell=tell)
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
