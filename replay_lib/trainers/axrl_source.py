"""Where AXRL is found, and what its source says; nothing of it is imported here. No torch."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from replay_lib.errors import TrainerError, fault

#: Names a checkout of AXRL; without it the installed package is taken.
VARIABLE = "SPIKE_REPLAY_AXRL"
#: AXRL's syntax (type statements, typing.override) needs this Python.
NEEDS_PYTHON = (3, 12)
TRAINER = "trainer axrl"  # how errors name it
PACKAGE = "axrl"
TRAINER_MODULE = "axrl.trainer.grpo_trainer"
TRAINER_CLASS = "GrpoTrainer"


def find_axrl() -> Path | None:
    """The directory that holds the package ``axrl``, or None where there is none.

    That is the checkout named by the environment variable SPIKE_REPLAY_AXRL, else whatever Python
    would import. TrainerError where the variable names a directory without it.
    """
    named = os.environ.get(VARIABLE)
    if named:
        root = Path(named).expanduser().resolve()
        if file_of(root, TRAINER_MODULE) is None:
            expected = f"a checkout with {TRAINER_MODULE.replace('.', '/')}.py"
            raise TrainerError(fault(f"environment variable {VARIABLE}", None, named, expected))
        return root
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve().parent if places else None


def require_axrl() -> Path:
    """As :func:`find_axrl`; TrainerError with what to do where AXRL cannot be imported here."""
    if sys.version_info < NEEDS_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        raise TrainerError(
            fault(
                TRAINER,
                "Python",
                found,
                "3.12 or later, which AXRL's syntax needs",
                "Install this package for such a Python and call it there; grpo, the built-in "
                "loss, runs here",
            )
        )
    root = find_axrl()
    if root is None:
        then = f"Install AXRL, or name a checkout of it in the environment variable {VARIABLE}."
        raise TrainerError(fault(TRAINER, None, "no package axrl", "AXRL to be importable", then))
    return root


def file_of(root: Path, module: str) -> Path | None:
    """The source file of ``module`` under ``root``, or None."""
    base = root.joinpath(*module.split("."))
    for file in (base / "__init__.py", base.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def fingerprint(file: Path) -> str:
    """The first 12 digits of a source file's sha256: which version of it ran."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def outside_imports(root: Path, module: str) -> dict[str, str]:
    """Modules outside AXRL that importing ``module`` imports, each with the file that names it.

    Only what runs at import counts: nothing inside functions or under TYPE_CHECKING.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        parents = [current.rpartition(".")[0]] if "." in current else []
        file = file_of(root, current)
        if current in seen or file is None:
            continue
        seen.add(current)
        todo += parents
        for named, names in _imports(ast.parse(file.read_text(encoding="utf-8"))):
            if named.split(".")[0] == PACKAGE:
                todo += [named, *(f"{named}.{name}" for name in names)]
            else:
                found.setdefault(named, str(file.relative_to(root)))
    return found


def _imports(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, []) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.module, [alias.name for alias in child.names]
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child)
