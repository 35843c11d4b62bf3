"""Whether a trainer can be there at all: asked before a worker starts, which takes seconds.

Nothing of the trainer is imported, neither its module nor a package around it: that may take torch
with it, and runs code that belongs into the worker. So only what is certain is refused. A module is
looked up as the import system would, a factory in the module's source; where the source fills its
names as it runs, the worker will tell. No torch.
"""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from replay_lib.errors import TrainerError
from replay_lib.trainers.axrl_source import require_axrl
from replay_lib.trainers.names import AXRL, GRPO, check_name

#: Whoever names one of these may give a module names that its source does not show.
_AS_IT_RUNS = frozenset(
    {"__dict__", "__getattr__", "eval", "exec", "globals", "locals", "modules", "setattr", "vars"}
)
#: And these, modules or places of modules.
_OF_PACKAGES = ("__path__", "sys.modules", "sys.meta_path")


def check_findable(name: str) -> str:
    """``name`` of a trainer that may be loaded; UsageError or TrainerError where it cannot."""
    check_name(name)
    if name == AXRL:
        require_axrl()
    elif name != GRPO:
        _check_factory(name)
    return name


def cannot_import(name: str, module: str, why: str) -> str:
    """The text for a module of the trainer ``name`` that cannot be imported."""
    return (
        f"trainer {name}: module {module!r} cannot be imported: {why}. It must lie where the "
        "command is called, or on PYTHONPATH"
    )


def no_factory(name: str, found: str, file: str | None) -> str:
    """The text for something else, or nothing, under the factory's name in ``file``."""
    factory = name.partition(":")[2]
    return (
        f"trainer {name}: found {found} under the name {factory!r} in {file}, expected a factory "
        "that takes the recorded settings and returns a trainer"
    )


def _check_factory(name: str) -> None:
    module, _, factory = name.partition(":")
    try:
        file = _source_of(name, module)
    except TrainerError:
        raise
    except Exception:  # of a finder of somebody else, or of directories nested without a file
        return
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise TrainerError(cannot_import(name, module, f"SyntaxError: {error}")) from error
    except (OSError, ValueError):
        return
    if not _may_define(tree, factory):
        raise TrainerError(no_factory(name, "nothing", str(file)))


def _source_of(name: str, module: str) -> Path | None:
    """The file that holds the source of ``module``; None where it has none that can be read.

    TrainerError where no finder knows the module, nor its package can have made it.
    """
    parts = module.split(".")
    spec: ModuleSpec | None = None
    for depth in range(1, len(parts) + 1):
        inner = _spec(".".join(parts[:depth]), spec)
        if inner is None:
            if spec is not None and _may_make_modules(spec):
                return None
            missing = f"No module named {'.'.join(parts[:depth])!r}"
            raise TrainerError(cannot_import(name, module, f"ModuleNotFoundError: {missing}"))
        spec = inner
    return _file_of(spec)


def _spec(module: str, package: ModuleSpec | None) -> ModuleSpec | None:
    """What the import system finds under ``module``, inside ``package`` if that is given."""
    places = None if package is None else package.submodule_search_locations
    if package is not None and places is None:
        return None  # it is no package
    for finder in sys.meta_path:
        ask = getattr(finder, "find_spec", None)  # finders of before Python 3.4 have none
        found: ModuleSpec | None = ask(module, places, None) if ask else None
        if found is not None:
            return found
    return None


def _file_of(spec: ModuleSpec | None) -> Path | None:
    file = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _may_make_modules(package: ModuleSpec) -> bool:
    """Whether running ``package`` may make modules that no finder sees before."""
    file = _file_of(package)
    if file is None:
        return package.has_location  # without a file it is a mere directory: nothing runs
    source = file.read_text(encoding="utf-8", errors="replace")
    return any(word in source for word in _OF_PACKAGES)


def _may_define(tree: ast.Module, wanted: str) -> bool:
    """Whether the module may have the name ``wanted`` once it ran."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {node.name}
        elif isinstance(node, ast.Name | ast.Attribute):
            names = {node.id if isinstance(node, ast.Name) else node.attr}
        elif isinstance(node, ast.alias):
            names = {(node.asname or node.name).partition(".")[0]}
        else:
            names = _others(node)
        if names & {wanted, "*"} or names & _AS_IT_RUNS:
            return True
    return False


def _others(node: ast.AST) -> set[str]:
    """Names that rarer statements bind."""
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return {node.name}
    if isinstance(node, ast.MatchMapping) and node.rest:
        return {node.rest}
    return set()
