"""From what somebody typed to one place: a job's output directory, a root, or one snapshot.

Nothing is guessed: several candidates are listed, and the error says how to choose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay_lib import layout
from replay_lib.errors import UsageError, did_you_mean, not_allowed

OUTPUTS_VARIABLE = "SPIKE_REPLAY_OUTPUTS"
DEEPEST = 3  # <output>/<recipe>/checkpoints/spike_snapshots: a trainer's longest default
NAMED = 20  # candidates that an error lists
_ROOTS = (layout.SNAPSHOT_ROOT, layout.PRESERVED_ROOT)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to look. ``roots`` are the trainer's (their preserved siblings are looked at too).

    ``output``, ``job`` and ``role`` are None where nothing above tells them; ``only`` is the one
    snapshot that was named; ``notes`` say what could not be looked at.
    """

    target: str
    output: Path | None
    job: str | None
    role: str | None
    roots: tuple[Path, ...]
    only: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An output directory ``*~<job>__<role>``, with the time of its newest change."""

    path: Path
    job: str
    role: str
    changed: float


def output_roots(given: Sequence[Path]) -> tuple[Path, ...]:
    """Directories of outputs: those given, else those of SPIKE_REPLAY_OUTPUTS."""
    if given:
        return tuple(given)
    listed = os.environ.get(OUTPUTS_VARIABLE, "").split(os.pathsep)
    return tuple(Path(text) for text in listed if text)


def locate(target: str, outputs: Sequence[Path] = (), role: str | None = None) -> Place:
    """The one place that ``target`` means: a path where it has a separator, else a job's name.

    UsageError where there is none or several, with the candidates, newest first.
    """
    path = Path(target)
    if os.sep in target or target in (".", ".."):
        return locate_path(path)
    roots = output_roots(outputs)
    found, notes = candidates(roots, target)
    chosen = [one for one in found if role in (None, one.role)]
    if path.is_dir() and chosen:
        told = f"{target!r} is a directory here, and a job's name in {chosen[0].path.parent}"
        raise UsageError(f"{told}: write ./{target} for the directory, or the job's path")
    if path.is_dir() and not found:
        return locate_path(path)
    if len(chosen) == 1:
        return _job_place(target, chosen[0], notes)
    raise UsageError(_choose(target, roots, found, role, notes))


def locate_path(path: Path) -> Place:
    """As :func:`locate`, of a path: a snapshot, a root of snapshots or an output directory."""
    if not path.is_dir():
        raise UsageError(f"{path}: found no such directory, expected {_KINDS}")
    place = path.absolute()
    if layout.step_of(place) is not None:
        return _place(path, root=place.parent, only=place)
    if place.name in _ROOTS or snapshots_in(place):
        return _place(path, root=place)
    named, _ = candidates([place], None)
    if named:
        lines = "".join(f"\n  {_described(one)}" for one in named[:NAMED])
        raise UsageError(f"{path}: found a directory of outputs, expected one of them:{lines}")
    roots = tuple(roots_in(place))
    if roots:
        job, role = layout.job_and_role(place.name) or (None, None)
        return Place(target=str(path), output=place, job=job, role=role, roots=roots)
    raise UsageError(
        f"{path}: found no {layout.SNAPSHOT_ROOT} down to level {DEEPEST}, expected {_KINDS}"
    )


_KINDS = "a job's name, an output directory, a root of snapshots, or one snapshot iter_*"


def candidates(roots: Sequence[Path], job: str | None) -> tuple[list[Candidate], tuple[str, ...]]:
    """Output directories of ``job`` (None: of any), newest first, and roots that are not there."""
    found: list[Candidate] = []
    notes = []
    for root in roots:
        try:
            found += _candidates_in(root, job)
        except OSError as error:
            notes.append(f"{root}: not looked at ({error.strerror or error})")
    return sorted(found, key=lambda one: (-one.changed, str(one.path))), tuple(notes)


def _candidates_in(root: Path, job: str | None) -> Iterator[Candidate]:
    with os.scandir(root) as entries:
        directories = [entry.name for entry in entries if "~" in entry.name and entry.is_dir()]
    for name in sorted(directories):
        named = layout.job_and_role(name)
        if named is not None and job in (None, named[0]):
            path = root.absolute() / name
            yield Candidate(path=path, job=named[0], role=named[1], changed=_changed(path))


def _changed(output: Path) -> float:
    """The newest change of the directory or of a root in it, seconds since the epoch."""
    above = output / layout.CHECKPOINTS
    return max(_mtime(p) for p in (output, above, *(above / name for name in _ROOTS)))


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def roots_in(output: Path) -> list[Path]:
    """The trainer's snapshot roots in an output directory, those that are only preserved too.

    ``checkpoints/`` is looked at first; where it has none, directories down to the third level.
    """
    usual = output / layout.CHECKPOINTS / layout.SNAPSHOT_ROOT
    if usual.is_dir() or layout.preserved_root(usual).is_dir():
        return [usual]
    found: dict[Path, None] = {}
    level = [output]
    for _ in range(DEEPEST):
        below = [path for directory in level for path in _directories(directory)]
        found |= dict.fromkeys(layout.source_root(p) for p in below if p.name in _ROOTS)
        level = [p for p in below if p.name not in _ROOTS and layout.step_of(p) is None]
    return sorted(found)


def _directories(above: Path) -> list[Path]:
    try:
        with os.scandir(above) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and _is_directory(e)]
    except OSError:
        return []
    return [above / name for name in sorted(names)]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)  # a loop of links would never end


def _place(path: Path, *, root: Path, only: Path | None = None) -> Place:
    """The place of a root or of a snapshot in it, with what the names above it tell."""
    above = next((p for p in root.parents if layout.job_and_role(p.name)), None)
    job, role = (layout.job_and_role(above.name) if above else None) or (None, None)
    roots = (layout.source_root(root),)
    return Place(target=str(path), output=above, job=job, role=role, roots=roots, only=only)


def _job_place(target: str, chosen: Candidate, notes: tuple[str, ...]) -> Place:
    roots = tuple(roots_in(chosen.path))
    if not roots:
        told = f"no {layout.SNAPSHOT_ROOT} down to level {DEEPEST} of it"
        notes = (*notes, f"{chosen.path}: {told}: no spike was saved, or it is saved elsewhere")
    return Place(
        target=target, output=chosen.path, job=target, role=chosen.role, roots=roots, notes=notes
    )


def _choose(
    job: str,
    roots: Sequence[Path],
    found: list[Candidate],
    role: str | None,
    notes: tuple[str, ...],
) -> str:
    """The text of the error: nothing of that name, or several."""
    beside = "".join(f"\n  {note}" for note in notes)
    if not roots:
        return (
            f"job {job!r}: found no directory of outputs to look in, expected --outputs ROOT or "
            f"ROOTs in {OUTPUTS_VARIABLE} (parted by {os.pathsep!r}); a path works without either"
        )
    if not found:
        everything, _ = candidates(roots, None)
        near = did_you_mean(job, sorted({one.job for one in everything}))
        looked = ", ".join(str(root) for root in roots)
        hint = f"{near} " if near else ""
        return (
            f"job {job!r}: found no directory *~{job}__<role> in {looked}. {hint}A directory with "
            f"another name is found by its path{beside}"
        )
    wrong_role = role is not None and not any(one.role == role for one in found)
    shown = found if wrong_role or role is None else [one for one in found if one.role == role]
    lines = "".join(f"\n  {_described(one)}" for one in shown[:NAMED])
    rest = f"\n  and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    if wrong_role:
        head = f"job {job!r}: found no role {role!r}, expected a role of one of"
    elif len({one.role for one in shown}) == len(shown):
        head = f"job {job!r}: found {len(shown)} output directories; choose one with --role"
    else:
        head = f"job {job!r}: found {len(shown)} output directories; choose one by its path"
    return f"{head}:{lines}{rest}{beside}"


def _described(one: Candidate) -> str:
    counts = []
    for root in roots_in(one.path):
        for place, word in ((root, "snapshots"), (layout.preserved_root(root), "preserved")):
            counts.append(f"{len(snapshots_in(place))} {word}")
    told = ", ".join(counts) or f"no {layout.SNAPSHOT_ROOT}"
    return f"--role {one.role}  {one.path}  ({told})"


def snapshots_in(root: Path) -> list[Path]:
    """Snapshot directories right inside ``root``, lowest step first; none where it is absent."""
    try:
        with os.scandir(root) as entries:
            inside = [root / e.name for e in entries if e.name.startswith("iter_") and e.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise not_allowed(error) from error
    stepped = [(step, path) for path in inside if (step := layout.step_of(path)) is not None]
    return [path for _, path in sorted(stepped)]
