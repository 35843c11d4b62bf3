"""What travels to a node: this library with methods and cards, the user's own code, snapshots."""

from __future__ import annotations

import ast
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from replay_lib.case import Case
from replay_lib.digests import digest_of, snapshot_files
from replay_lib.errors import UsageError
from replay_lib.methods import builtin_dir
from replay_lib.record.cards import cards_dir
from replay_lib.remote.sync import Parcel

_DISTRIBUTION = "axrl-spike-replay"
_PACKAGE = Path(__file__).parents[1]
_SMALL = 1 << 20  # bytes: a file beside code that code may read; larger ones are data
_MOST = 64 << 20  # bytes of the user's code

Part = tuple[Path, str, tuple[str, ...]]


def library_parcel(scratch: Path) -> Parcel:
    """This library as it is imported here; ``scratch`` is a directory for what is written for it.

    Its version travels as a ``dist-info``, so that results name it as they do here.
    """
    parts: list[Part] = [(_PACKAGE, "replay_lib", _code_files(_PACKAGE))]
    for inside, home in (("mitigations", builtin_dir()), ("spike-mitigation-methods", cards_dir())):
        if not home.is_relative_to(_PACKAGE):
            parts.append((home, inside, _code_files(home)))
    try:
        named = version(_DISTRIBUTION)
    except PackageNotFoundError:
        return _parcel("code", parts)
    info = scratch / f"axrl_spike_replay-{named}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {named}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return _parcel("code", [*parts, (info, info.name, ("METADATA",))])


def case_parcel(case: Case) -> Parcel:
    """The snapshots of ``case``, every file: optimizer state lies in the files of the weights."""
    roles = {"snapshot": case.snapshot} | ({} if case.quiet is None else {"quiet": case.quiet})
    parts = tuple(
        (home, f"{role}/{home.name}", _relative(home, snapshot_files(home)))
        for role, home in roles.items()
    )
    # the names of the directories are no part of the digest, but of the place
    names = "\0".join([case.digest(), *(inside for _, inside, _ in parts)])
    return Parcel(f"cases/{hashlib.sha256(os.fsencode(names)).hexdigest()[:32]}", parts)


def there(case: Case, root: str) -> Case:
    """``case`` as it lies in ``root`` on the node, under the names of :func:`case_parcel`."""
    roles = {case.snapshot: "snapshot"} | ({} if case.quiet is None else {case.quiet: "quiet"})
    places = {home: f"{root}/{role}/{home.name}" for home, role in roles.items()}
    stated: dict[str, str] = {}
    for name, digest in case.sha256.items():
        assert case.file is not None, "a bare snapshot states no digests"
        file = (case.file.parent / name).parent.resolve() / Path(name).name
        for home, role in roles.items():
            if file.is_relative_to(home):
                stated[f"{role}/{home.name}/{file.relative_to(home).as_posix()}"] = digest
    moved = {
        "snapshot": Path(places[case.snapshot]),
        "quiet": None if case.quiet is None else Path(places[case.quiet]),
        "file": None if case.file is None else Path(root) / case.file.name,
        "sha256": stated,
    }
    return case.model_copy(update=moved)


@dataclass(frozen=True)
class Own:
    """The user's code on the node, below a parcel's place: directories of modules and methods."""

    parcel: Parcel | None
    path: tuple[str, ...]
    mitigations: tuple[str, ...]
    reference: tuple[str, ...]


def own_parcel(
    modules: Iterable[str], mitigations: Sequence[Path], reference: Sequence[Path], trainer: str
) -> Own:
    """``modules`` (as imported) and what they import from where they lie, and ``mitigations``.

    What lies in ``site-packages`` has to be installed on the node. ``reference`` are the places
    that ``trainer`` of a reference is imported from before all else.
    """
    methods = [(home, f"mitigations/{n}", _code_files(home)) for n, home in enumerate(mitigations)]
    wanted = {name.partition(".")[0] for name in modules}
    wanted |= set(_imported(home / name for home, _, names in methods for name in names))
    path = _places("path", wanted, [Path(entry or Path.cwd()).resolve() for entry in sys.path])
    module = trainer.partition(":")[0].partition(".")[0]
    theirs = _places("reference", {module} if reference else set(), reference)
    parts = [*path, *theirs, *methods]
    parcel = _parcel("own", parts) if parts else None
    if parcel is not None and not parcel.size <= _MOST:
        raise UsageError(
            f"--ssh: found {parcel.size / 1e6:.0f} MB of code of your own around {sorted(wanted)}, "
            f"expected {_MOST >> 20} MiB at most; call the command where less lies beside it"
        )
    under = "" if parcel is None else f"{parcel.place}/"
    listed = [
        tuple(f"{under}{inside}" for _, inside, _ in some) for some in (path, methods, theirs)
    ]
    return Own(parcel, *listed)


def _places(role: str, wanted: set[str], entries: Sequence[Path]) -> list[Part]:
    """The modules called ``wanted`` and all that they import from ``entries``, by entry."""
    found: dict[Path, set[str]] = {}
    seen: set[str] = set()
    while wanted - seen:
        name = min(wanted - seen)
        seen.add(name)
        for top in _lying(name, entries):
            files = _code_files(top) if top.is_dir() else ("",)
            inside = [f"{top.name}/{file}" if file else top.name for file in files]
            found.setdefault(top.parent, set()).update(inside)
            wanted = wanted | set(_imported(top.parent / file for file in inside))
    homes = [entry for entry in dict.fromkeys(entries) if entry in found]
    return [(home, f"{role}/{n}", tuple(sorted(found[home]))) for n, home in enumerate(homes)]


def _lying(name: str, entries: Sequence[Path]) -> Iterator[Path]:
    """The files or directories of the module ``name``, unless it is an installed one."""
    if name == _PACKAGE.name or name in sys.stdlib_module_names:
        return
    spec = PathFinder.find_spec(name, [str(entry) for entry in entries])
    if spec is None:
        return
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    for place in map(Path, places):
        top = place.parent if place.name.startswith("__init__.") else place
        if top.exists() and not _installed(top):
            yield top.resolve()


def _installed(place: Path) -> bool:
    """Whether ``place`` belongs to an interpreter, whose node has its own."""
    homes = {sysconfig.get_path(n) for n in ("purelib", "platlib", "stdlib", "platstdlib")}
    homes |= {*site.getsitepackages(), site.getusersitepackages()}
    return any(place.resolve().is_relative_to(Path(home).resolve()) for home in homes if home)


def _imported(sources: Iterable[Path]) -> Iterator[str]:
    """First names of what is imported anywhere in the ``*.py`` of ``sources``."""
    for file in sources:
        if file.suffix != ".py":
            continue
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
        except (OSError, SyntaxError, ValueError):
            continue  # whoever imports it is told
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def _code_files(home: Path) -> tuple[str, ...]:
    """Code in ``home`` and small files beside it; nothing hidden, nothing compiled by Python."""
    files = [file.relative_to(home) for file in sorted(home.rglob("*")) if file.is_file()]
    return tuple(
        file.as_posix()
        for file in files
        if not any(part.startswith(".") or part == "__pycache__" for part in file.parts)
        if file.suffix == ".py" or (home / file).stat().st_size <= _SMALL
    )


def _relative(home: Path, files: Iterable[Path]) -> tuple[str, ...]:
    return tuple(file.relative_to(home).as_posix() for file in files)


def _parcel(above: str, parts: Sequence[Part]) -> Parcel:
    """A parcel whose place is named by the content of its files and where they go."""
    lines = [
        f"{digest_of(home / name)} {inside}/{name}\0"
        for home, inside, names in parts
        for name in names
    ]
    digest = hashlib.sha256(os.fsencode("".join(lines))).hexdigest()
    return Parcel(f"{above}/{digest[:32]}", tuple(parts))
