"""A method's function as code that stands alone on a card."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay_lib.errors import PatchError, fault
from replay_lib.patch import Mitigation, Patch


def code_of(method: Mitigation, params: Mapping[str, Any]) -> str:
    """What ``method`` needs of its file, and a last statement that binds ``patch`` to its patches.

    One patch, or a tuple of several. The code is run once here: PatchError where it does not give
    patches at the method's own seams.
    """
    file, name = _place(method)
    code = f"{_needed(file, name)}\n\n{_last(method, name, params)}\n"
    _check(code, file, method, params)
    return code


def _place(method: Mitigation) -> tuple[Path, str]:
    """File and name of the function."""
    build = method.build
    name = getattr(build, "__name__", "")
    try:
        found = inspect.getsourcefile(build)
    except TypeError:
        found = None
    inside = getattr(build, "__qualname__", "")
    if found is None or not name.isidentifier() or inside != name:
        told = f"its function is {inside or build!r}"
        expected = "a function at the top level of a file"
        raise PatchError(fault(f"mitigation {method.slug}", "source", told, expected))
    return Path(found), name


def _needed(file: Path, name: str) -> str:
    """The statement that defines ``name`` and those that it needs, in the file's own order."""
    text = file.read_text(encoding="utf-8")
    statements = ast.parse(text).body
    defines = {bound: number for number, one in enumerate(statements) for bound in _bound(one)}
    wanted, queue = set(), [name]
    while queue:
        number = defines.get(queue.pop())
        if number is None or number in wanted:
            continue
        wanted.add(number)
        queue += [n.id for n in ast.walk(statements[number]) if isinstance(n, ast.Name)]
    future = [n for n, one in enumerate(statements) if _is_future(one)]
    lines = text.splitlines()
    parts = [_text(lines, statements[number]) for number in sorted({*wanted, *future})]
    return _spaced(parts)


def _bound(statement: ast.stmt) -> list[str]:
    """Names that a statement of a file binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(a.asname or a.name).partition(".")[0] for a in statement.names]
    return [
        n.id
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ] + [
        (a.asname or a.name).partition(".")[0]
        for n in ast.walk(statement)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    ]


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _text(lines: list[str], statement: ast.stmt) -> str:
    """As it is written, with decorators and the comment lines right above it."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(one.lineno for one in decorators)]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : statement.end_lineno])


def _spaced(parts: list[str]) -> str:
    """Imports close together, all else two lines apart."""
    text = ""
    for part in parts:
        close = part.startswith(("import ", "from ")) and text.rpartition("\n")[2].startswith(
            ("import ", "from ")
        )
        text += ("\n" if close else "\n\n\n") * bool(text) + part
    return text


def _last(method: Mitigation, name: str, params: Mapping[str, Any]) -> str:
    """``patch = ...``: of a declared method its patches, of a plain function what it returns."""
    held = getattr(sys.modules.get(method.build.__module__), name, None)
    given = ", ".join(f"{key!r}: {value!r}" for key, value in sorted(params.items()))
    if not isinstance(held, Mitigation):
        return f"patch = {name}({', '.join(f'{k}={v!r}' for k, v in sorted(params.items()))})"
    several = len(method.patches(params)) > 1
    head = "patch" if several else "(patch,)"
    return f"{head} = {name}.patches({f'{{{given}}}' if given else ''})"


def _check(code: str, file: Path, method: Mitigation, params: Mapping[str, Any]) -> None:
    names: dict[str, Any] = {"__name__": "card"}
    try:
        exec(compile(code, f"card of {method.slug}", "exec"), names)
        made = names["patch"]
        patches = (made,) if isinstance(made, Patch) else tuple(made)
        seams = [patch.seam for patch in patches]
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise PatchError(
            fault(
                file,
                method.build.__name__,
                f"code that does not run alone ({told})",
                "a function that needs nothing but imports and the top level of its own file",
            )
        ) from error
    if seams != [patch.seam for patch in method.patches(params)]:
        told = ", ".join(seams)
        expected = ", ".join(patch.seam for patch in method.patches(params))
        raise PatchError(fault(file, "seams of the code alone", told, expected))
