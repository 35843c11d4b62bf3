"""What a trainer is compared with: another trainer, or the same one at a git revision."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from replay_lib.errors import UsageError
from replay_lib.trainers.names import AXRL, GRPO, check_name

GIT_SECONDS = 600  # an archive of a large repository over a slow file system


@dataclass(frozen=True)
class Reference:
    """``trainer`` as ``--trainer`` takes it; ``path`` goes before all else where it is imported.

    ``told`` is how a report calls it.
    """

    told: str
    trainer: str
    path: tuple[Path, ...] = ()


@contextlib.contextmanager
def reference_of(against: str, trainer: str) -> Iterator[Reference]:
    """The reference called ``against``: a trainer's name, else a git revision.

    A revision is unpacked into a directory of its own, which is removed at the end; the user's tree
    and repository are left alone.
    Raises UsageError where there is no such revision, it lacks the trainer's module, or ``trainer``
    lies in no git repository.
    """
    if against in (GRPO, AXRL) or ":" in against:
        yield Reference(against, check_name(against))
        return
    if trainer in (GRPO, AXRL):
        raise UsageError(
            f"--against {against}: expected a trainer ({GRPO}, {AXRL} or module:factory): a git "
            f"revision is the reference of a trainer given as module:factory, not of {trainer}"
        )
    module = trainer.partition(":")[0].partition(".")[0]
    entry = _entry_of(module)
    with _unpacked(against, _repository(module, entry, against)) as (root, copy):
        path = _moved(root, copy, entry)
        whole = trainer.partition(":")[0]
        absent = _absent(whole, path)
        # what is not found in the tree either is made otherwise; the worker will tell
        if absent is not None and _absent(whole, [entry]) is None:
            raise UsageError(
                f"--against {against}: that revision has no module {absent!r}. Take a later one, "
                f"or a trainer to compare with ({GRPO}, {AXRL}, module:factory)"
            )
        yield Reference(f"{trainer} at {against}", trainer, path)


def _entry_of(module: str) -> Path:
    """The directory that ``module`` (no dots) is imported from; nothing is imported."""
    spec = PathFinder.find_spec(module, [entry or str(Path.cwd()) for entry in sys.path])
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    found = next((Path(p) for p in places if p and p not in ("built-in", "frozen")), None)
    if found is None:
        raise UsageError(
            f"--trainer: found no module {module!r}; it must lie where the command is called, or "
            "on PYTHONPATH"
        )
    package = found.parent if found.name.startswith("__init__.") else found
    return package.resolve().parent


def _repository(module: str, entry: Path, against: str) -> Path:
    root = _git(entry, "rev-parse", "--show-toplevel")
    if root is None:
        raise UsageError(
            f"--against {against}: expected a trainer or a git revision, but {module!r} is "
            f"imported from {entry}, which is in no git repository"
        )
    return Path(root).resolve()


@contextlib.contextmanager
def _unpacked(revision: str, root: Path) -> Iterator[tuple[Path, Path]]:
    commit = _git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise UsageError(
            f"--against {revision}: no trainer is called so ({GRPO}, {AXRL}, module:factory), and "
            f"{root} has no such revision"
        )
    with tempfile.TemporaryDirectory(prefix="guard-") as home:
        packed, copy = Path(home) / "reference.tar", Path(home).resolve() / "reference"
        if _git(root, "archive", "--format=tar", f"--output={packed}", commit) is None:
            raise UsageError(f"--against {revision}: git could not read it out of {root}")
        with tarfile.open(packed) as archive:
            archive.extractall(copy, filter="data")
        packed.unlink()
        yield root, copy


def _absent(module: str, path: Sequence[Path]) -> str | None:
    """The first part of ``module`` that ``path`` does not have; nothing of it is imported."""
    places: Sequence[str] | None = [str(entry) for entry in path]
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = None if places is None else PathFinder.find_spec(name, places)
        if spec is None:
            return name
        places = spec.submodule_search_locations
    return None


def _moved(root: Path, copy: Path, first: Path) -> tuple[Path, ...]:
    """The places that modules are imported from inside ``root``, as they lie in ``copy``.

    ``first`` is that of the trainer's own module. A worker puts them before all else.
    """
    entries = [first, *(Path(entry or Path.cwd()).resolve() for entry in sys.path)]
    inside = [copy / entry.relative_to(root) for entry in entries if entry.is_relative_to(root)]
    return tuple(dict.fromkeys(path for path in inside if path.is_dir()))


def _git(where: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
