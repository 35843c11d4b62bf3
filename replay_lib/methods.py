"""All registered mitigations by slug, and what an experiment's call means.

One file holds one mitigation: ``mitigations/clip_advantages.py`` declares the slug
``clip-advantages``. Files are loaded by path under private module names, so that no top-level
``mitigations`` package is needed or taken. A user's own directories add to the built-in one, and
``module:function`` names a method that is registered nowhere.

Importing this module, or loading the methods, does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from replay_lib.errors import PatchError, did_you_mean, fault
from replay_lib.patch import Mitigation, Patch, mitigation

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class MethodCall(Protocol):
    """What :func:`resolve` needs to know of an experiment's ``MitigationCall``."""

    @property
    def slug(self) -> str:
        """A registered slug, or ``module:function``."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters by name."""
        ...


def builtin_dir() -> Path:
    """The directory of the built-in methods: packaged in an installation, else the repository's."""
    package = Path(__file__).parent
    packaged = package / "_builtin" / "mitigations"
    return packaged if packaged.is_dir() else package.parent / "mitigations"


def load_methods(dirs: Iterable[str | Path] | None = None) -> dict[str, Mitigation]:
    """Every mitigation by slug, in alphabetical order: the built-in ones and those in ``dirs``.

    Raises PatchError for a directory that does not exist, a file that fails to load or holds no
    mitigation or several, a slug that is malformed or does not match its file's name, and a slug
    that two files declare.
    """
    files: dict[str, Path] = {}
    methods: dict[str, Mitigation] = {}
    # keyed by the resolved path: naming one directory twice is no duplicate
    directories = {Path(d).resolve(): Path(d) for d in [builtin_dir(), *(dirs or ())]}
    for directory in directories.values():
        for file in _method_files(directory):
            method = _load_file(file)
            if method.slug in methods:
                raise PatchError(
                    fault(
                        file,
                        "slug",
                        f"{method.slug!r}, which {files[method.slug]} declares too",
                        "every slug once",
                        "Rename one of the two files and its slug",
                    )
                )
            methods[method.slug], files[method.slug] = method, file
    return dict(sorted(methods.items()))


def callable_alone(methods: Mapping[str, Mitigation]) -> list[str]:
    """Slugs that can be tried as they are: those of methods that need no parameter."""
    return [slug for slug, method in methods.items() if not method.needs]


def left_out(methods: Mapping[str, Mitigation]) -> str:
    """One line on the registered methods that need a parameter; empty where none does."""
    named = [method.usage for method in methods.values() if method.needs]
    told = "needs a parameter and was" if len(named) == 1 else "need parameters and were"
    return f"{', '.join(named)} {told} left out" if named else ""


def find(slug: str, methods: Mapping[str, Mitigation]) -> Mitigation:
    """The mitigation that ``slug`` names, registered or ``module:function``; PatchError if none."""
    if ":" in slug:
        return _user_method(slug)
    if slug not in methods:
        near = did_you_mean(slug, methods)
        known = f"known: {', '.join(sorted(methods)) or 'none'}."
        told = f"{near} All are listed by spike-replay methods." if near else known
        raise PatchError(
            f"mitigation {slug}: not registered; {told} A method of your own is named "
            f"module:function, or put into a directory given by --mitigations"
        )
    return methods[slug]


def resolve(call: MethodCall, methods: Mapping[str, Mitigation]) -> tuple[Patch, ...]:
    """Patches of ``call``, in the order written; PatchError if slug or parameters are wrong."""
    return find(call.slug, methods).patches(call.params)


def _method_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise PatchError(
            fault(directory, None, "no such directory", "a directory of mitigation files")
        )
    # a leading underscore marks what is not a method (__init__.py and the like)
    return sorted(f for f in directory.glob("*.py") if not f.name.startswith("_"))


def _load_file(file: Path) -> Mitigation:
    module = _load_module(file)
    held = {id(v): v for v in vars(module).values() if isinstance(v, Mitigation)}
    if len(held) != 1:
        found = ", ".join(repr(m.slug) for m in held.values()) or "none"
        raise PatchError(
            fault(
                file,
                "mitigations",
                found,
                "exactly one a file",
                "Declare it with @replay_lib.patch.mitigation(slug=...)",
            )
        )
    (method,) = held.values()
    _check_slug(file, method.slug)
    return method


def _check_slug(file: Path, slug: str) -> None:
    if not _SLUG.fullmatch(slug):
        raise PatchError(
            fault(file, "slug", repr(slug), "lower-case words and digits joined by hyphens")
        )
    if file.stem != slug.replace("-", "_"):
        name = slug.replace("-", "_") + ".py"
        raise PatchError(fault(file, "slug", repr(slug), f"the file to be named {name}"))


def _load_module(file: Path) -> ModuleType:
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"_replay_lib_mitigation_{digest}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PatchError(fault(file, None, "a file that cannot be loaded", "a Python file"))
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickles look a class's module up by name while it is being executed
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PatchError(
            fault(file, None, f"{type(error).__name__}: {error}", "a file that loads without error")
        ) from error
    return module


def _user_method(slug: str) -> Mitigation:
    """``module:function``; the function is a Mitigation, or returns a patch or several."""
    module_name, _, attribute = slug.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise PatchError(
            f"mitigation {slug}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}. It must be on PYTHONPATH of the worker as well"
        ) from error
    target = getattr(module, attribute, None)
    if isinstance(target, Mitigation):
        return target
    if not callable(target):
        found = "nothing" if target is None else type(target).__name__
        near = did_you_mean(attribute, (n for n, v in vars(module).items() if callable(v)))
        raise PatchError(
            f"mitigation {slug}: found {found} under the name {attribute!r} in {module.__file__}, "
            f"expected a mitigation or a function that returns its patches"
            + (f"; {near}" if near else "")
        )
    summary = (getattr(target, "__doc__", None) or attribute).strip().splitlines()[0]
    declare = mitigation(slug=slug, family="user", summary=summary, source=str(module.__file__))
    return declare(target)
