"""``spike-replay preserve`` and ``release``: snapshots out of the rotation's reach, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from replay_lib.cli.arguments import Json, as_path
from replay_lib.cli.bytes_bar import bytes_bar
from replay_lib.cli.output import print_error, print_json, stderr, stdout
from replay_lib.cli.units import printable, size_text
from replay_lib.errors import SpikeReplayError
from replay_lib.exit_codes import ExitCode
from replay_lib.finding import locate_path
from replay_lib.preserving import Preserved
from replay_lib.preserving.many import Attempt, preserve_each, task_named
from replay_lib.record.task import Task


def preserve_command(
    snapshot: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT_OR_ROOT",
            parser=as_path,
            help="A snapshot (iter_*), a root of snapshots or an output directory (all in it), or "
            "a preserved snapshot.",
        ),
    ],
    *,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="The task it belongs to [default: the job in the directory's name]."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every file: keep its sha256, or compare it."),
    ] = False,
    background: Annotated[
        bool,
        typer.Option(
            "--hash/--no-hash",
            help="Without --verify: let a process of its own, at the lowest priority, fill in "
            "sha256. find and preserve tell how far it came.",
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Preserve snapshots in the sibling spike_snapshots-active/, which no rotation reaches.

    Large checkpoint files are hardlinked and small ones copied; the snapshot itself is never
    touched. Of one that is preserved already it says so, and whether it still is what it was.
    """
    place = locate_path(snapshot)
    named = task_named(place, task)
    if named is None:
        then = "name a task with --task JOB"
        told = f"not kept in a ledger: no job in the name of a directory above it; {then}"
        stderr().print(told, soft_wrap=True)
    with bytes_bar("preserving") as tell:
        attempts = preserve_each(
            place, named, verified=verify, background=background, tell=tell, waiting=_waiting
        )
    failed = [one.error for one in attempts if one.error is not None]
    if json:
        print_json(_document(attempts, named, failed))
    else:
        for one in attempts:
            _tell(one)
    raise typer.Exit(failed[0].exit_code if failed else ExitCode.GREEN)


def _waiting(target: Path) -> None:
    told = f"another command preserves {target}; waiting for it"
    stderr().print(printable(told), soft_wrap=True)


def _document(
    attempts: list[Attempt], task: Task | None, failed: list[SpikeReplayError]
) -> dict[str, Any]:
    told = [preserved_json(one.done) for one in attempts if one.done is not None]
    document: dict[str, Any] = {"task": task.job if task else None, "preserved": told}
    if failed:
        text = "\n".join(str(error) for error in failed)
        document["error"] = {"code": failed[0].code, "message": text}
    return document


def preserved_json(done: Preserved) -> dict[str, Any]:
    """Plain values of what one attempt came to."""
    manifest = done.manifest
    return {
        "snapshot": str(done.source),
        "preserved": str(done.path),
        "step": manifest.step,
        "already": done.already,
        "source_gone": done.source_gone,
        "files": len(manifest.files),
        "bytes": manifest.bytes,
        "linked": manifest.linked,
        "copied": len(manifest.files) - manifest.linked,
        "hashed": manifest.hashed,
        "verified": done.verified,
        "hashing": done.hashing,
        "cleared": [str(path) for path in done.cleared],
    }


def _tell(one: Attempt) -> None:
    if one.error is not None:
        print_error(one.error.code, str(one.error), as_json=False)
    if one.done is None:
        return
    done, manifest = one.done, one.done.manifest
    head = "preserved already" if done.already else "preserved"
    figures = f"{len(manifest.files)} files, {size_text(manifest.bytes)}, {manifest.how}"
    lines = [f"{head}: {done.path}", f"  {figures}"]
    if done.verified:
        lines.append("  every file was read: its sha256 is the one in the manifest")
    elif manifest.hashed == len(manifest.files):
        lines.append("  sha256 of every file is known; --verify compares them")
    else:
        by = "a process in the background fills in the rest" if done.hashing else "no process runs"
        lines.append(f"  sha256 of {manifest.hashed} of {len(manifest.files)} files is known; {by}")
    if done.source_gone:
        lines.append("  its source is gone: the trainer's rotation, or somebody, deleted it")
    lines += [f"  removed what a killed command had left: {path.name}" for path in done.cleared]
    stdout().print(printable("\n".join(lines)), soft_wrap=True)
